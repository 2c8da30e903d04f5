"""The two stages and two queues of publication: what is refused, what waits, what a cancellation and a close leave."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from numem.errors import ClosedError, InputError, IntegrityError, RejectedError
from numem.store import barrier
from numem.store.memory import Memory, PublicationLimits, Ticket
from numem.store.payload import sidecar
from tests.store_fixtures import SCOPE, assert_readable, make_chain, make_node, payload, put, read_back

WAIT = 30.0


@contextmanager
def held_at(step: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold whichever thread reaches a step first: (reached, let it go on)."""
    reached, go = threading.Event(), threading.Event()

    def hold(found: str, what: str) -> None:
        if found == step and not reached.is_set():
            reached.set()
            assert go.wait(WAIT)

    end = barrier.observe(hold)
    try:
        yield reached, go
    finally:
        go.set()
        end()


def outcome(ticket: Ticket) -> str:
    error = ticket.published.exception(WAIT)
    return "published" if error is None else type(error).__name__


def test_with_queues_of_one_the_first_runs_the_second_waits_the_third_is_refused(tmp_path: Path) -> None:
    """seed-systems §1.7: capture-accepted 2, capture-rejected 1; both futures of the refused one carry the reason."""
    chain = make_chain(3)
    with Memory(tmp_path, limits=PublicationLimits(max_pending_captures=1)) as memory:
        with held_at("captured") as (reached, go):
            first = memory.publish(*chain[0], queue="cache", capture="later")
            assert reached.wait(WAIT)
            second = memory.publish(*chain[1], queue="cache", capture="later")
            third = memory.publish(*chain[2], queue="cache", capture="later")
            assert [ticket.accepted for ticket in (first, second, third)] == [True, True, False]
            assert not first.captured.done() and not second.captured.done()
            for future in (third.captured, third.published):
                error = future.exception(0)
                assert isinstance(error, RejectedError) and error.code == "capture-queue"
            assert third.rejection.startswith("capture-queue: publish: 1 captures wait")
            stats = memory.stats()
            assert (stats["captures_accepted"], stats["captures_rejected"]) == (2, 1)
            assert (stats["capture_queue"], stats["staging_bytes"]) == (1, 140_000)
            go.set()
            assert [outcome(ticket) for ticket in (first, second)] == ["published"] * 2
        assert first.rejection == second.rejection == ""
        assert memory.get(chain[2][0].id) is None
        assert memory.stats()["staging_bytes"] == 0
        # Refused is not lost: there is room again.
        assert outcome(memory.publish(*chain[2], queue="cache")) == "published"
        assert_readable(memory, chain)


def test_a_payload_over_the_byte_budget_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    """seed-systems §1.7: 32 bytes against a budget of 31. A checkpoint of that size is never dropped: it goes alone."""
    data = [payload(32, 1)]
    node = make_node(data)
    with Memory(tmp_path, limits=PublicationLimits(max_staging_bytes=31)) as memory:
        for capture in ("now", "later"):
            ticket = memory.publish(node, data, queue="cache", capture=capture)
            assert (ticket.accepted, ticket.estimated_bytes, dict(ticket.timings)) == (False, 32, {})
            assert isinstance(ticket.captured.exception(0), RejectedError)
            assert isinstance(ticket.published.exception(0), RejectedError)
            assert ticket.rejection.startswith(
                "staging-bytes: publish: 32 bytes do not fit the staging budget, 0 of 31"
            )
        stats = memory.stats()
        assert (stats["captures_rejected"], stats["captures_rejected_bytes"]) == (2, 64)
        assert stats["staging_bytes"] == stats["capture_queue"] == stats["publication_queue"] == 0
        assert memory.get(node.id) is None
        assert outcome(memory.publish(node, data)) == "published"
        assert_readable(memory, [(node, data)])


def test_accepted_is_not_published_while_the_disk_is_slow(tmp_path: Path) -> None:
    """LMCache#207, mooncake#2818, seed-systems §1.7: captured, then pending and invisible, then visible and right."""
    chain = make_chain(1)
    node = chain[0][0]
    with Memory(tmp_path) as memory:
        with held_at("written") as (reached, go):
            ticket = memory.publish(*chain[0])
            assert reached.wait(WAIT)
            assert ticket.captured.done() and not ticket.published.done()
            assert memory.get(node.id) is None and memory.placements(node.pieces[0]) == ()
            assert not memory.available(node.id)
            go.set()
            assert ticket.published.result(WAIT).stored == 1
        assert_readable(memory, chain)


def test_a_failed_write_leaves_the_catalog_clean_and_a_retry_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(3)

    def refuse(self: sidecar.SidecarWriter, data: Any) -> int:
        raise OSError(5, "Input/output error")

    with Memory(tmp_path) as memory:
        put(memory, make_chain(1, seed=9, name="first"))
        with monkeypatch.context() as patch:
            patch.setattr(sidecar.SidecarWriter, "write", refuse)
            tickets = [memory.publish(*entry) for entry in chain]
            assert [outcome(ticket) for ticket in tickets] == ["StoreError"] * 3
        assert all(ticket.captured.done() and ticket.rejection == "" for ticket in tickets)
        assert [memory.get(node.id) for node, _ in chain] == [None] * 3
        assert [memory.publish(*entry).published.result(WAIT).stored for entry in chain] == [1] * 3
        assert_readable(memory, chain)
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()


@pytest.mark.parametrize("capture", ["now", "later"])
def test_a_full_publication_queue_drops_cache_entries_and_says_so(tmp_path: Path, capture: str) -> None:
    """seed-systems §1.7: captured is done, published failed, the catalog clean, the drop counted."""
    chain = make_chain(3)
    with Memory(tmp_path, limits=PublicationLimits(max_pending_publications=1)) as memory:
        with held_at("written") as (reached, go):
            running = memory.publish(*chain[0], queue="cache", capture=capture)
            memory._parts.committer.hurry()
            assert reached.wait(WAIT)
            waiting = memory.publish(*chain[1], queue="cache", capture=capture)
            waiting.captured.result(WAIT)
            while not memory.stats()["publication_queue"]:
                time.sleep(0.001)
            dropped = memory.publish(*chain[2], queue="cache", capture=capture)
            assert outcome(dropped) == "RejectedError"
            assert dropped.captured.exception(WAIT) is None
            assert dropped.rejection.startswith("publication-queue: publish: dropped, 1 cache entries wait")
            assert memory.stats()["publications_rejected"] == 1
            go.set()
            assert [outcome(ticket) for ticket in (running, waiting)] == ["published"] * 2
        assert memory.get(chain[2][0].id) is None
        assert_readable(memory, chain[:2])


@pytest.mark.parametrize(
    ("limits", "held"),
    [
        # One in the commit, one in the queue, one captured and waiting for the queue.
        (PublicationLimits(max_pending_publications=1), 3),
        (PublicationLimits(max_staging_bytes=100_000), 1),
    ],
)
def test_a_checkpoint_waits_for_room_and_is_never_dropped(tmp_path: Path, limits: PublicationLimits, held: int) -> None:
    chain = make_chain(6)
    with Memory(tmp_path, limits=limits) as memory:
        with held_at("written") as (reached, go):
            tickets = [memory.publish(*chain[0])]
            memory._parts.committer.hurry()
            assert reached.wait(WAIT)
            writer = threading.Thread(target=lambda: tickets.extend(memory.publish(*entry) for entry in chain[1:]))
            writer.start()
            while held > 1 and memory.stats()["staging_bytes"] < held * 70_000:
                time.sleep(0.001)
            writer.join(0.1)
            assert writer.is_alive()
            assert memory.stats()["staging_bytes"] == held * 70_000
            go.set()
            writer.join(WAIT)
        assert [outcome(ticket) for ticket in tickets] == ["published"] * 6
        assert "captures_rejected" not in memory.stats()
        assert_readable(memory, chain)


def test_checkpoints_overtake_cache_entries(tmp_path: Path) -> None:
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        with held_at("written") as (reached, go):
            memory.publish(*chain[0])
            memory._parts.committer.hurry()
            assert reached.wait(WAIT)
            cached = memory.publish(*chain[1], queue="cache")
            checkpoint = memory.publish(*chain[2], queue="checkpoint")
            go.set()
            assert [outcome(cached), outcome(checkpoint)] == ["published"] * 2
        assert [memory.placements(node.pieces[0])[0].offset for node, _ in chain[1:]] == [73_728, 0]


@pytest.mark.parametrize("queue", ["checkpoint", "cache"])
@pytest.mark.parametrize("capture", ["now", "later"])
def test_the_payload_is_taken_before_captured_is_done(tmp_path: Path, queue: str, capture: str) -> None:
    """pytorch#144657: the caller overwrites, or recycles, its buffer once `captured` is done."""
    data = bytearray(payload(300_000, 1))
    kept = bytes(data)
    node = make_node([kept])
    with Memory(tmp_path) as memory:
        ticket = memory.publish(node, [data], queue=queue, capture=capture)
        assert ticket.accepted
        assert capture == "later" or ticket.captured.done()
        ticket.captured.result(WAIT)
        data[:] = bytes(len(data))
        data.clear()  # a buffer that is still referred to could not be resized
        assert ticket.published.result(WAIT).stored == 1
        assert read_back(memory, node, [300_000]) == [kept]


def test_the_store_holds_the_pages_until_they_are_captured(tmp_path: Path) -> None:
    """vllm#52360, vllm#29870, lmcache#4955: pages cannot go while an asynchronous store still reads them."""
    chain = make_chain(1, seed=9, name="first")
    data = bytearray(payload(70_000, 1))
    node = make_node([bytes(data)])
    with Memory(tmp_path) as memory:
        with held_at("captured") as (reached, go):
            memory.publish(*chain[0], capture="later")
            assert reached.wait(WAIT)
            ticket = memory.publish(node, [data], capture="later")
            with pytest.raises(BufferError):
                data.clear()
            go.set()
            ticket.captured.result(WAIT)
        data.clear()
        assert outcome(ticket) == "published"


def test_bytes_that_changed_before_they_were_captured_are_refused(tmp_path: Path) -> None:
    """pytorch#144657, second form: the promise was broken, and the digest finds out; others are not held up."""
    chain = make_chain(2)
    data = bytearray(payload(70_000, 1))
    node = make_node([bytes(data)], name="changed")
    with Memory(tmp_path) as memory:
        with held_at("captured") as (reached, go):
            others = [memory.publish(*chain[0], capture="later")]
            assert reached.wait(WAIT)
            ticket = memory.publish(node, [data], capture="later")
            others.append(memory.publish(*chain[1], capture="later"))
            data[5] ^= 1
            go.set()
            for future in (ticket.captured, ticket.published):
                assert isinstance(future.exception(WAIT), IntegrityError)
            assert [outcome(other) for other in others] == ["published"] * 2
        assert memory.get(node.id) is None and memory.stats()["staging_bytes"] == 0


def test_tickets_tell_where_the_time_went(tmp_path: Path) -> None:
    data = [payload(70_000, 1), payload(100, 2)]
    with Memory(tmp_path) as memory:
        ticket = memory.publish(make_node(data), data)
        assert ticket.published.result(WAIT).stored == 2
        assert list(ticket.timings) == ["capture", "queue", "write", "barrier", "catalog", "total"]
        phases = dict(ticket.timings)
        total = phases.pop("total")
        assert all(ms >= 0 for ms in phases.values())
        assert sum(phases.values()) <= total * 1.001
        assert ticket.estimated_bytes == 70_100


def test_results_hold_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """seed-systems §1.7. Neither a receipt nor the error of a failed publication keeps the bytes alive."""
    size = 1 << 20
    chain = make_chain(4, size)

    def refuse(self: sidecar.SidecarWriter, data: Any) -> int:
        raise OSError(5, "Input/output error")

    with Memory(tmp_path) as memory:
        memory.publish(*chain[0]).published.result(WAIT)
        before = pa.total_allocated_bytes()
        kept = [memory.publish(*chain[1])]
        assert outcome(kept[0]) == "published"
        with held_at("captured") as (reached, go):
            kept.append(memory.publish(*chain[2], capture="later"))
            assert reached.wait(WAIT)
            assert kept[1].cancel()
            go.set()
            assert outcome(kept[1]) == "CancelledError"
        with monkeypatch.context() as patch:
            patch.setattr(sidecar.SidecarWriter, "write", refuse)
            kept.append(memory.publish(*chain[3]))
            assert outcome(kept[2]) == "StoreError"
        memory.flush()
        assert pa.total_allocated_bytes() - before < size


def test_close_drains_both_stages_and_then_refuses(tmp_path: Path) -> None:
    """close() captures and publishes what was accepted; afterwards every call says that the memory is closed."""
    chain = make_chain(5)
    memory = Memory(tmp_path)
    tickets = [memory.publish(*entry, capture="later") for entry in chain[:2]]
    tickets += [memory.publish(*entry) for entry in chain[2:4]]
    sequence = memory.record("decision", chain[0][0].id, {"choice": "restore", "ms": 1.5})
    memory.close()
    memory.close()
    assert [ticket.published.result(0).stored for ticket in tickets] == [1] * 4
    for queue in ("cache", "checkpoint"):
        late = memory.publish(*chain[4], queue=queue)
        assert not late.accepted and not late.cancel()
        assert isinstance(late.captured.exception(0), ClosedError)
        assert isinstance(late.published.exception(0), ClosedError)
        assert late.rejection.startswith("closed: memory: closed")
    for call in (memory.flush, memory.staged, memory.usage, lambda: memory.get(SCOPE), lambda: memory.stage(*chain[0])):
        with pytest.raises(ClosedError):
            call()
    with Memory(tmp_path) as again:
        assert_readable(again, chain[:4])
        assert again.get(chain[4][0].id) is None
        (record,) = again.records("decision", chain[0][0].id)
        assert (record.sequence, record.body) == (sequence, {"choice": "restore", "ms": 1.5})
        assert again.records("other") == ()


def test_whatever_races_with_close_is_published_or_refused(tmp_path: Path) -> None:
    chains = [make_chain(40, 1000, seed=n, name=str(n)) for n in range(3)]
    memory = Memory(tmp_path, limits=PublicationLimits(max_pending_captures=2, max_pending_publications=4))
    tickets: list[tuple[Any, Ticket]] = []

    def publish(chain: list[Any], queue: str, capture: str) -> None:
        for entry in chain:
            tickets.append((entry, memory.publish(*entry, queue=queue, capture=capture)))

    ways = [("cache", "later"), ("checkpoint", "later"), ("checkpoint", "now")]
    threads = [threading.Thread(target=publish, args=(chain, *way)) for chain, way in zip(chains, ways, strict=True)]
    for thread in threads:
        thread.start()
    while len(tickets) < 20:
        time.sleep(0.001)
    memory.close()
    for thread in threads:
        thread.join(WAIT)
    assert len(tickets) == 120
    outcomes = {ticket: outcome(ticket) for _, ticket in tickets}
    assert set(outcomes.values()) <= {"published", "ClosedError", "RejectedError"}
    with Memory(tmp_path) as again:
        assert again.recovered == ()
        for entry, ticket in tickets:
            assert (again.get(entry[0].id) is not None) == (outcomes[ticket] == "published")
            if outcomes[ticket] == "published":
                assert_readable(again, [entry])


def test_queues_and_limits_are_named(tmp_path: Path) -> None:
    chain = make_chain(1)
    with Memory(tmp_path) as memory:
        with pytest.raises(InputError, match="queue 'fast'; use checkpoint or cache"):
            memory.publish(*chain[0], queue="fast")
        with pytest.raises(InputError, match="capture 'lazy'; use now or later"):
            memory.publish(*chain[0], capture="lazy")
        assert memory.stats()["staging_bytes"] == 0
    with pytest.raises(InputError, match="max_pending_captures is 0; it is at least 1"):
        PublicationLimits(max_pending_captures=0)


def test_cancelled_before_a_commit_nothing_of_it_is_there(tmp_path: Path) -> None:
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        with held_at("written") as (reached, go):
            running = memory.publish(*chain[0])
            memory._parts.committer.hurry()
            assert reached.wait(WAIT)
            with held_at("captured") as (capturing, go_on):
                taken = memory.publish(*chain[1], capture="later")
                assert capturing.wait(WAIT)
                waiting = memory.publish(*chain[2], capture="later")
                assert taken.cancel() and waiting.cancel() and not waiting.cancel()
                assert isinstance(waiting.captured.exception(0), CancelledError)
                go_on.set()
                assert outcome(taken) == outcome(waiting) == "CancelledError"
                assert taken.captured.exception(WAIT) is None
            queued = memory.publish(*chain[3])
            assert queued.cancel() and outcome(queued) == "CancelledError"
            assert not running.cancel() and not running.published.cancel()
            assert memory.stats()["publications_cancelled"] == 3
            go.set()
            assert outcome(running) == "published" and not running.cancel()
        assert memory.stats()["staging_bytes"] == 0
        assert [memory.get(node.id) is None for node, _ in chain] == [False, True, True, True]
        assert [outcome(memory.publish(*entry)) for entry in chain[1:]] == ["published"] * 3
        assert_readable(memory, chain)
