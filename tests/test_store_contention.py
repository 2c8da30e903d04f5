"""Threads, processes and nodes in each other's way: order of locks, callbacks, and what belongs to whom."""

import os
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread

import pytest

from numem.errors import RejectedError, StoreError
from numem.store import barrier
from numem.store.catalog.facts import State
from numem.store.memory import Memory, PublicationLimits, TierSpec
from numem.store.payload.pieces import Piece
from numem.store.upkeep import collect
from tests.store_fixtures import Chain, assert_readable, die_at, make_chain, make_node, payload, put, run_children

WAIT_S = 30.0


def chain(count: int, name: str) -> Chain:
    return make_chain(count, seed=sum(name.encode()), name=name)


def publish_and_end(home: Path, name: str) -> None:
    with Memory(home) as memory:
        put(memory, chain(3, name))


def ended(*threads: Thread) -> bool:
    for thread in threads:
        thread.join(WAIT_S)
    return not any(thread.is_alive() for thread in threads)


def test_a_collection_does_not_hold_the_number_of_a_writer_that_a_commit_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path)
    put(memory, chain(1, "own"))
    run_children(publish_and_end, [(tmp_path, "other")])
    parts = memory.care._parts
    collect.retire(parts, [node.id for node, _ in chain(3, "other")], "collected")
    removing, committing = Event(), Event()
    remove, name = collect.remove, parts.catalog._writer

    def slow_remove(*arguments: object) -> int:
        removing.set()
        assert committing.wait(WAIT_S)
        return remove(*arguments)  # type: ignore[arg-type] # passed on as they came

    def slow_name() -> str:
        committing.set()  # under the catalog's lock
        return name()

    monkeypatch.setattr(collect, "remove", slow_remove)
    collecting = Thread(target=lambda: memory.care.collect(grace_s=0), daemon=True)
    collecting.start()
    assert removing.wait(WAIT_S)
    parts.catalog._writer = slow_name
    publishing = Thread(target=lambda: put(memory, chain(1, "more")), daemon=True)
    publishing.start()
    assert ended(collecting, publishing)
    memory.close()
    with Memory(tmp_path) as memory:
        assert_readable(memory, [*chain(1, "own"), *chain(1, "more")])


def test_a_commit_that_writes_again_does_not_wait_for_an_append_that_asks_the_catalog(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    shared, extra = payload(70_000, 1), payload(70_000, 2)
    first, second = make_node([shared], name="1"), make_node([shared, extra], name="2")
    put(memory, [(first, [shared])])
    parts = memory.care._parts
    collect.retire(parts, [first.id], "collected")
    loading, started = Event(), Event()
    threads: list[Thread] = []

    def load(view: memoryview) -> None:
        loading.set()
        with parts.catalog.exclusive():  # as where a bad source is judged
            view[:] = extra

    def append() -> None:
        piece = Piece(b"p" * 32, len(extra), b"x" * 16, load)
        parts.home.append([piece], lambda volume, damaged: "{}", parts.prepare_volume)

    def meanwhile(step: str, what: str) -> None:
        if step == "payload durable" and not started.is_set():
            started.set()
            collect.sweep(parts, parts.home, 0)
            threads.append(Thread(target=append, daemon=True))
            with parts.catalog.exclusive():
                threads[0].start()
                assert loading.wait(WAIT_S)
            # From here on the commit and the append want the same two locks.

    done = barrier.observe(meanwhile)
    try:
        publishing = Thread(target=lambda: put(memory, [(second, [shared, extra])]), daemon=True)
        publishing.start()
        assert ended(publishing)
        assert ended(*threads)
    finally:
        done()
    assert_readable(memory, [(second, [shared, extra])])
    memory.close()


def test_what_is_damaged_when_a_commit_writes_it_again_is_not_acknowledged(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        shared, extra = payload(70_000, 1), payload(70_000, 2)
        first, second = make_node([shared], name="1"), make_node([shared, extra], name="2")
        put(memory, [(first, [shared])])
        parts = memory.care._parts
        collect.retire(parts, [first.id], "collected")
        memory.stage(second, [shared, extra])
        swept: list[str] = []

        def meanwhile(step: str, what: str) -> None:
            if step == "payload durable" and not swept:
                swept.append(step)
                collect.sweep(parts, parts.home, 0)
                parts.spool.discard(second.id)

        done = barrier.observe(meanwhile)
        try:
            report = memory.publish_staged([second.id])
        finally:
            done()
        assert report.missing == (second.id,)
        assert memory.get(second.id) is None


def test_two_machines_with_the_same_node_name_lose_nothing_to_each_others_collections(tmp_path: Path) -> None:
    home = tmp_path / "home"
    one, two = chain(4, "one"), chain(1, "two")
    a = Memory(home, local=tmp_path / "a")
    put(a, one)
    b = Memory(home, local=tmp_path / "b")
    put(b, two)
    care = b.care
    assert len(b._parts.home.volumes()) == 2
    assert b._parts.home.closed_volumes() == []
    collect.retire(b._parts, [node.id for node, _ in one[1:]], "collected")
    assert care.collect(grace_s=0).removed == 1  # a has it open, but b has made a newer one
    more = chain(3, "more")
    put(a, more)
    care.collect(grace_s=0)
    meant = chain(3, "meant")
    collect.retire(b._parts, [node.id for node, _ in more], "collected")

    def meanwhile(step: str, what: str) -> None:
        if step == "payload durable" and not begun:
            begun.append(what)
            b._parts.home.close_volume()
            put(b, chain(1, "newer"))
            removed.extend(care.collect(grace_s=0, dead_fraction=0.1).removed for _ in range(2))

    begun: list[str] = []
    removed: list[int] = []
    done = barrier.observe(meanwhile)
    try:
        put(a, meant)
    finally:
        done()
    assert sum(removed) >= 1
    care.collect(grace_s=0)
    a.close()
    b.close()
    with Memory(home, local=tmp_path / "a") as a:
        assert_readable(a, [one[0], *two, *meant])


def test_a_compaction_keeps_what_became_of_copies_in_the_tiers_of_other_nodes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    nodes = chain(2, "n")
    (content,) = nodes[0][0].pieces

    def opened(node: str) -> Memory:
        return Memory(home, node=node, local=tmp_path / node)

    with opened("a") as a:
        put(a, nodes)
        a.promote([node.id for node, _ in nodes], "ssd")
        (bad,) = (place for place in a.placements(content) if place.tier == "ssd")
        a._parts.quarantine(bad.turned(a._parts.clock.next(), State.QUARANTINED, "bad"))
    with opened("b") as b:
        b.care.compact(least=1)
    with opened("a") as a:
        assert [place.tier for place in a.placements(content)] == ["object"]
        assert a.recovered == ()


def test_a_compaction_without_the_archive_keeps_where_archived_pieces_lie(tmp_path: Path) -> None:
    home = {"object": TierSpec(tmp_path / "object", capacity=1 << 20)}
    archive = {"archive": TierSpec(tmp_path / "archive", write="archive")}
    nodes = chain(3, "n")
    with Memory(tmp_path / "home", tiers={**home, **archive}) as memory:
        put(memory, nodes)
        memory.care.archive(close=True)
        memory.residency.evict("object", 3 * 70_000)
        memory.care.collect(grace_s=0)
    with Memory(tmp_path / "home", tiers=home) as memory:
        memory.care.compact(least=1, keep_versions_s=0)
    with Memory(tmp_path / "home", tiers={**home, **archive}) as memory:
        assert_readable(memory, nodes)


def test_the_home_copy_of_a_refused_publication_is_not_waited_for(tmp_path: Path) -> None:
    tiers = {"object": TierSpec(tmp_path / "object"), "ssd": TierSpec(tmp_path / "ssd", write="back")}
    with Memory(tmp_path / "home", tiers=tiers, limits=PublicationLimits(max_staging_bytes=1000)) as memory:
        ((node, data),) = chain(1, "n")
        ticket = memory.publish(node, data, queue="cache")
        assert not ticket.accepted
        assert ticket.replicated is not None
        assert isinstance(ticket.replicated.exception(WAIT_S), RejectedError)


def test_a_callback_of_a_publication_may_ask_for_records_and_not_wait_for_itself(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        ((node, data),) = chain(1, "n")
        memory.record("kind", node.id, {"a": 1})
        told: Future[tuple[int, str]] = Future()

        def tell(_: object) -> None:
            count = len(memory.records("kind"))
            try:
                memory.flush()
            except StoreError as error:
                told.set_result((count, str(error)))

        memory.publish(node, data).published.add_done_callback(tell)
        count, why = told.result(WAIT_S)
        assert count == 1
        assert why.startswith("flush: called by a callback of a publication")


def test_background_work_survives_what_it_did_not_expect(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        parts = memory.residency._parts
        ran = Event()

        def fails() -> None:
            raise OSError(5, "Input/output error")

        parts.background._tasks = {"fails": fails, "runs": ran.set}
        parts.background.signal("fails")
        memory.residency.settle()
        assert "Input/output error" in str(parts.background.errors["fails"])
        parts.background.signal("runs")
        assert ran.wait(WAIT_S)


def test_a_handle_does_not_keep_the_space_of_removed_volumes(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        nodes = chain(4, "n")
        put(memory, nodes)
        assert_readable(memory, nodes)
        parts = memory.care._parts
        parts.home.close_volume()
        put(memory, chain(1, "next"))
        collect.retire(parts, [node.id for node, _ in nodes], "collected")
        assert memory.care.collect(grace_s=0).removed == 1
        held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        assert [name for name in held if name.startswith(str(tmp_path)) and name.endswith(" (deleted)")] == []


def test_forget_takes_what_this_process_has_under_way(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        nodes = chain(3, "n")
        put(memory, nodes[:2])
        ticket = memory.publish(*nodes[2], capture="later")
        report = memory.care.forget(scope=nodes[0][0].scope, actor="test", reason="test")
        assert ticket.published.result(WAIT_S).id == nodes[2][0].id
        assert (report.nodes, report.unreached) == (3, ())
        assert memory.nodes() == ()


def archive_and_die(home: Path) -> None:
    memory = Memory(home, tiers=archived(home))
    die_at("archived file", 2)
    memory.care.archive(close=True)


def archived(home: Path) -> dict[str, TierSpec]:
    return {"object": TierSpec(home / "object"), "archive": TierSpec(home.parent / "archive", write="archive")}


def test_forget_names_copies_in_an_archive_that_were_cut_short(tmp_path: Path) -> None:
    home = tmp_path / "home"
    nodes = chain(1, "n")
    with Memory(home, tiers=archived(home)) as memory:
        put(memory, nodes)
    assert run_children(archive_and_die, [(home,)]) == [-9]
    with Memory(home, tiers=archived(home)) as memory:
        (left,) = memory.care.forget(ids=[nodes[0][0].id], actor="test", reason="test").unreached
        assert left == "archive/local.w000.000001.lance: a copy that was cut short may hold some; delete it there"
