"""Decisions as records of a memory: written cheaply, folded with what they cost, found by any process; the alarm of a
memory that is written and never found."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from numem import Memory
from numem.errors import InputError
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.lineage.decisions import DecisionLog
from numem.lineage.explain import explain
from numem.policy.decision import Alternative, Decision, Measured, Recorded, Regret
from numem.runtime.restore.prefix import lookup
from numem.store.catalog import compact
from numem.store.memory import PublicationLimits
from numem.store.publication import committer, drops
from numem.store.upkeep.doctor import diagnose
from tests.evict_fixtures import SIZE, open_small, singles
from tests.store_fixtures import make_chain, make_node, payload, put, run_children

RECOMPUTE = Alternative("recompute", 390.0, {"compute_tokens": 2049})
SSD = Alternative("restore:ssd", 41.0, {"tokens": 1792, "bytes": 1 << 20, "load_ms": 12.5})
COLD = Alternative("restore:object", None, {}, "cost unknown")


def arrive(request: str = "r1", subject: bytes = b"\x01" * 32, choice: str = "restore:ssd") -> Decision:
    return Decision(
        "arrive", request, subject, "measured", {"tokens": 2049, "resident": 0}, (RECOMPUTE, SSD, COLD), choice
    )


def test_a_decision_and_its_outcome_are_one_row_and_the_same_in_another_process(tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
        id = log.record(arrive())
        log.outcome(id, 44, read_ms=30.5)
        assert len(id) == 32 and log.recording
        (found,) = log.all()
        assert (found.id, found.decision) == (id, arrive())
        assert found.measured == (Measured("restore:ssd", 44.0, {"read_ms": 30.5}),)
        assert abs(found.when_ns - time.time_ns()) < 600e9
    with Memory(tmp_path / "m") as memory:
        assert DecisionLog(memory).all() == (found,)
        (record,) = memory.records("decision/")
        assert (record.kind, record.subject) == ("decision/arrive", b"\x01" * 32)


def test_an_outcome_that_comes_later_finds_its_decision(tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        first = DecisionLog(memory).record(arrive("late"))
        log = DecisionLog(memory)
        second = log.record(arrive("later"))
        memory.flush()
        log.outcome(second, 44.0)
        log.outcome(first, 45.0)  # whose log is another one, as after a restart
        log.outcome(second, 391.0, choice="recompute")
        assert [r.kind for r in memory.records("decision/")] == ["decision/arrive"] * 2 + ["decision/outcome"] * 3
        found = {one.id: one.measured for one in log.all()}
        assert found == {
            first: (Measured("restore:ssd", 45.0),),
            second: (Measured("restore:ssd", 44.0), Measured("recompute", 391.0)),
        }


def _decide(home: str, name: str) -> None:
    with Memory(home) as memory:
        log = DecisionLog(memory)
        for number in range(50):
            log.outcome(log.record(arrive(f"{name}{number}")), float(number))


def test_several_processes_write_while_another_reads(tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
        assert run_children(_decide, [(str(tmp_path / "m"), name) for name in "ab"]) == [0, 0]
        found = log.all("arrive")
        assert {one.decision.request for one in found} == {f"{name}{n}" for name in "ab" for n in range(50)}
        assert len({one.id for one in found}) == 100 and all(one.measured for one in found)
        assert [one.when_ns for one in found] == sorted((one.when_ns for one in found), reverse=True)
        assert log.of_request("a7")[0].measured[0].cost_ms == 7.0
        assert log.of_request("c7") == log.all("evict") == ()


def test_a_chunk_has_the_decisions_about_every_boundary_that_it_leads_to(tmp_path: Path) -> None:
    chain, other = make_chain(3), make_chain(1, seed=5, name="other")
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path / "m") as memory:
        put(memory, [*chain, *other])
        log = DecisionLog(memory)
        whole = log.record(arrive("whole", ids[2]))
        short = log.record(arrive("short", ids[0]))
        elsewhere = log.record(replace(arrive("elsewhere", other[0][0].id), others=(ids[1],)))
        log.record(arrive("nowhere", b""))
        assert [one.id for one in log.about(ids[0])] == [short, whole]
        assert [one.id for one in log.about(ids[1])] == [elsewhere, whole]
        assert [one.id for one in log.about(ids[2])] == [whole]
        assert log.about(b"\x09" * 32) == ()


def test_a_memory_that_is_only_read_or_closed_records_nothing_and_raises_nothing(tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        DecisionLog(memory).record(arrive())
    with Memory(tmp_path / "m", read_only=True) as memory:
        log = DecisionLog(memory)
        assert not log.recording
        log.outcome(log.record(arrive("lost")), 1.0)
        assert [one.decision.request for one in log.all()] == ["r1"]
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
    log.outcome(log.record(arrive("lost")), 1.0)
    with Memory(tmp_path / "m") as memory:
        assert len(memory.records("decision/")) == 1


def test_numbers_of_numpy_and_infinite_ones_are_written_as_json_has_them(tmp_path: Path) -> None:
    odd = Alternative("restore:dead", float("inf"), {"rate": np.float32(0.5), "left": float("nan"), "n": np.int64(3)})  # type: ignore[dict-item]  # what callers pass all the same
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
        log.record(replace(arrive(), alternatives=(RECOMPUTE, SSD, odd)))
        (found,) = log.all()
        assert found.decision.alternatives[2] == Alternative("restore:dead", None, {"rate": 0.5, "left": None, "n": 3})
        with pytest.raises(InputError, match="term 'tensor'"):
            log.record(replace(arrive(), inputs={"tensor": [1]}))  # type: ignore[dict-item]  # refused


def test_rows_that_are_no_decisions_are_passed_over(tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        memory.record("decision/restore", b"\x01" * 32, {"run": "old", "tokens": 5})
        memory.record("decision/arrive", b"\x01" * 32, {"id": 1, "alternatives": "none"})
        assert DecisionLog(memory).all() == ()


def test_a_flood_of_decisions_is_written_in_few_commits_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "NOTES_WINDOW_S", 600.0)
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
        decision, count = arrive(), 3000
        began = time.thread_time()
        ids = [log.record(decision) for _ in range(count)]
        for id in ids:
            log.outcome(id, 1.0)
        assert (time.thread_time() - began) / count < 1e-3  # 20 µs where nobody else works
        assert len(log.all()) == count
        assert len(memory._parts.catalog.tables["records"].dataset.fragments()) <= 4
        monkeypatch.setattr(committer, "MOST_NOTES", 2)
        for _ in range(5):
            log.record(decision)
        assert memory.stats()["notes_lost"] == 3
        assert len(log.all()) == count + 2


def test_decisions_never_fail_a_flush_or_the_facts_beside_them(tmp_path: Path) -> None:
    """What cannot be written is lost and counted; a record that somebody waits for is not."""
    with Memory(tmp_path / "m") as memory:
        memory.note("decision/arrive", b"", {"bad": {1, 2}})
        memory.flush()
        assert memory.stats()["notes_lost"] == 1
        memory.record("note", b"", {"n": 1})
        DecisionLog(memory).record(arrive())
        memory.flush()
        assert [record.kind for record in memory.records()] == ["decision/arrive", "note"]


def test_what_cannot_be_written_is_lost_alone(tmp_path: Path) -> None:
    """A body that is no JSON, or no text, takes no decision beside it; a record that somebody waits for is refused."""
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
        log.record(arrive("before"))
        memory.note("decision/arrive", b"", {"bad": {1, 2}})
        memory.note("decision/arrive", b"", {"request": "half a pair \ud800"})
        memory.note("note", b"", {"nan": float("nan")})
        body: dict[str, object] = {"n": 1}
        assert memory.amend(memory.note("note", b"", body), lambda: body.update(n=object()))
        log.record(arrive("after"))
        assert [one.decision.request for one in log.all()] == ["after", "before"]
        assert memory.stats()["notes_lost"] == 4
        with pytest.raises(InputError, match="not plain JSON"):
            memory.record("note", b"", {"text": "\ud800"})
        memory.flush()


def test_forgetting_takes_every_decision_and_report_of_a_tenant(tmp_path: Path) -> None:
    """Also those about no state at all, about a part of a chunk, and the job's reports, which hold ids of prompts."""
    chain = make_chain(2)
    node = chain[1][0]
    with Memory(tmp_path / "m") as memory:
        put(memory, chain)
        log = DecisionLog(memory, node.scope)
        late = log.record(arrive("about nothing", b""))
        DecisionLog(memory).record(arrive("a part", node.marks[0]))
        DecisionLog(memory, b"\x05" * 32).record(arrive("another tenant", b""))
        memory.record("job/decode", b"\x03" * 16, {"run": "r", "shown": [{"id": "prompt of the tenant"}]})
        memory.record("job/prefill", b"\x03" * 16, {"run": "r", "scope": node.scope.hex()})
        memory.record("job/decode", b"\x04" * 16, {"run": "r", "shown": [{"id": "prompt of another"}]})
        memory.flush()
        log.outcome(late, 1.0)
        memory.care.forget(scope=node.scope, reason="test", actor="test")
        assert [one.decision.request for one in log.all()] == ["another tenant"]
        left = [(r.kind, r.subject[:1]) for kind in ("job/", "decision/") for r in memory.records(kind)]
        assert left == [("job/decode", b"\x04"), ("decision/arrive", b"")]


def test_maintenance_keeps_the_newest_decisions_and_forgetting_takes_those_that_name_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(2)
    with Memory(tmp_path / "m") as memory:
        put(memory, chain)
        log = DecisionLog(memory)
        for number in range(6):
            log.record(arrive(str(number), b"\x07" * 32))
            memory.flush()
        monkeypatch.setattr(compact, "KEEP_DECISIONS", 4)
        memory.care.maintain(least=2)
        assert [one.decision.request for one in log.all()] == ["5", "4", "3", "2"]
        monkeypatch.undo()
        log.record(replace(arrive("names it"), others=(chain[1][0].id,)))
        log.record(arrive("about it", chain[1][0].id))
        memory.flush()
        memory.care.forget(ids=[chain[1][0].id], reason="test", actor="test")
        assert [one.decision.request for one in log.all("arrive")] == ["5", "4", "3", "2"]


# decisions of the durable plane


def test_a_promotion_is_one_decision_with_the_tiers_it_could_come_from(tmp_path: Path) -> None:
    put_in = singles(3)
    ids = [node.id for node, _ in put_in]
    with open_small(tmp_path, 4) as memory:
        put(memory, put_in)
        memory.promote(ids)
        memory.promote(ids)  # copies nothing, and decides nothing
        (one,) = DecisionLog(memory).all("promote")
        decision = one.decision
        assert (decision.subject, decision.others, decision.choice) == (ids[0], tuple(ids[1:]), "from:object")
        assert {name: decision.inputs[name] for name in ("tier", "held", "pieces", "bytes", "failed")} == {
            "tier": "ssd", "held": 0, "pieces": 3, "bytes": 3 * SIZE, "failed": 0,
        }  # fmt: skip
        assert [(a.name, a.terms.get("pieces"), a.terms.get("bytes")) for a in decision.alternatives] == [
            ("from:object", 3, 3 * SIZE),
            ("leave", None, None),
        ]
        assert [one.id for one in DecisionLog(memory).about(ids[2])] == [one.id]
        said = explain(decision)[0]
        assert said.startswith("promoted 3 pieces of 3 states (210,000 bytes) to ssd, from object, in ")


def test_a_full_cache_queue_is_told_twice_however_much_it_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record for the first drop, one for all that follow within some time."""
    monkeypatch.setattr(drops, "EVERY_S", 3600.0)
    limits = PublicationLimits(max_staging_bytes=SIZE)
    with Memory(tmp_path / "m", limits=limits) as memory:
        nodes = [make_node([data], name=f"d{n}") for n in range(40) for data in [payload(2 * SIZE, n)]]
        for number, node in enumerate(nodes):
            ticket = memory.publish(node, [payload(2 * SIZE, number)], queue="cache")
            assert ticket.rejection.startswith("staging-bytes: ")
        log = DecisionLog(memory)
        (first,) = log.all("drop")
        assert (first.decision.subject, first.decision.inputs["entries"]) == (nodes[0].id, 1)
    with Memory(tmp_path / "m") as memory:
        log = DecisionLog(memory)
        second, again = log.all("drop")
        assert again == first
        assert (second.decision.inputs["entries"], second.decision.inputs["bytes"]) == (39, 39 * 2 * SIZE)
        assert [one.id for one in log.about(nodes[20].id)] == [second.id]
        said = explain(second.decision)
        assert said[0] == "dropped 39 cache entries (5,460,000 bytes) at the limit staging-bytes, 0 waiting"
        assert said[1].startswith("publish: 140000 bytes do not fit the staging budget")


# sentences


def test_an_arrival_is_explained_with_its_numbers() -> None:
    assert explain(arrive(), Measured("restore:ssd", 44.0, {"loaded": 1792})) == [
        "restored 1,792 of 2,049 tokens from ssd: predicted 41 ms, recompute 390 ms, took 44 ms",
        "regret 0.0% (estimated: from predictions; not every alternative was executed)",
    ]
    assert explain(arrive(), Measured("restore:ssd", 400.0), Measured("recompute", 300.0))[1] == (
        "regret 25.0% (measured: every alternative was executed)"
    )
    assert explain(arrive(choice="recompute")) == [
        "computed 2,049 tokens: predicted 390 ms, restore from ssd 41 ms, it has not been measured",
        "regret 89.5% (estimated: from predictions; not every alternative was executed)",
    ]
    alone = replace(arrive(choice="recompute"), alternatives=(RECOMPUTE, replace(SSD, declined="no pages")))
    assert explain(alone, Measured("recompute", 380.0)) == [
        "computed 2,049 tokens: predicted 390 ms, took 380 ms",
        "regret 0.0% (measured: no other alternative was open)",
    ]
    assert explain(arrive(), Measured("recompute", 500.0))[:2] == [
        "computed 2,049 tokens: predicted 390 ms, restore from ssd 41 ms, took 500 ms",
        "restore:ssd was chosen (measured), and could not be carried out",
    ]
    probe = Alternative("two-ended:ssd", terms={"probe": True, "bytes": 7})
    probed = replace(arrive(choice="recompute"), alternatives=(RECOMPUTE, probe), choice="two-ended:ssd")
    assert explain(probed, Measured("two-ended:ssd", 400.0, {"loaded": 16}))[:2] == [
        (
            "restored 16 of 2,049 tokens from ssd, from the back, while the others were computed from the front: "
            "recompute 390 ms, took 400 ms"
        ),
        "what ssd costs was not known: this measured it, while computing went on",
    ]


def test_one_thing_is_said_as_one() -> None:
    one = Decision("evict", "", b"\x01" * 32, "lru", {"tier": "ssd", "nodes": 1, "bytes": 1}, (RECOMPUTE,), "recompute")
    assert explain(one)[0] == "evicted 1 state (1 byte) from ssd by lru"
    moved = replace(one, kind="promote", inputs={"tier": "ssd", "pieces": 1, "bytes": 1200, "failed": 1})
    said = ["promoted 1 piece of 1 state (1,200 bytes) to ssd, from recompute", "1 piece could not be copied"]
    assert explain(moved) == said
    dropped = replace(one, kind="drop", inputs={"entries": 1, "bytes": 7, "reason": "staging-bytes", "waiting": 1})
    assert explain(dropped) == ["dropped 1 cache entry (7 bytes) at the limit staging-bytes, 1 waiting"]
    assert explain(replace(arrive(choice="recompute"), inputs={"tokens": 1}))[0].startswith("computed 1 token: ")


def test_regret_is_measured_only_where_everything_was_executed() -> None:
    def of(*measured: Measured) -> Regret | None:
        return Recorded("", 0, arrive(), measured).regret()

    assert of() == Regret(0.0, False)
    assert of(Measured("restore:ssd", 780.0)) == Regret(0.5, False)
    assert of(Measured("restore:ssd", 780.0), Measured("recompute", 195.0)) == Regret(0.75, True)
    unknown = replace(arrive(), alternatives=(replace(SSD, cost_ms=None),))
    assert Recorded("", 0, unknown).regret() is None


# written and never found

IDENTITY = Identity({"model": "m", "layers": 2}, NumericPolicy("exact", b"\x02" * 32), "cpu")


def _write(memory: Memory, identity: Identity) -> None:
    memory.register(identity)
    data = payload(1000, 1)
    node = make_node([data], parent=identity.scope)
    put(memory, [(replace(node, scope=identity.scope), [data])])


def _look(memory: Memory, identity: Identity, count: int = 3) -> None:
    memory.register(identity)
    for _ in range(count):
        with lookup(memory, identity.scope, range(100)) as match:
            assert match.tokens == 0


@pytest.mark.parametrize(
    ("reader", "fields"),
    [
        (replace(IDENTITY, salt=b"tenant"), "salt"),
        (replace(IDENTITY, device_class="cuda-sm90"), "device_class"),
        (replace(IDENTITY, semantic={"model": "m", "layers": 3}), "semantic.layers"),
    ],
)
def test_state_that_is_written_under_one_scope_and_looked_for_under_another_raises_an_alarm(
    tmp_path: Path, reader: Identity, fields: str
) -> None:
    """sglang#12092, DingoCache#77: writes land and are never read, silently: the salt differs by accident."""
    home = tmp_path / "m"
    with Memory(home) as memory:
        _write(memory, IDENTITY)
        assert memory.unread() == ()
    assert diagnose(home).findings == ()
    with Memory(home) as memory:
        _look(memory, reader)
        assert (memory.stats()["lookups"], memory.stats()["lookups_found"]) == (3, 0)
        (alarm,) = memory.unread()
        assert (alarm.nodes, alarm.lookups, alarm.fields) == (1, 3, (fields,))
    report = diagnose(home)
    (finding,) = report.findings
    assert report.ok  # nothing is wrong with what it holds
    assert finding.what == (
        f"written and never found: 1 chunks under scope {IDENTITY.scope.hex()[:16]}, 3 lookups under scope "
        f"{reader.scope.hex()[:16]}; they differ in {fields}"
    )
    assert finding.remedy == "open writer and reader with the same model, numeric policy, device class and salt"


def test_two_salts_differ_in_the_salt_though_neither_is_described(tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        data = payload(1000, 1)
        writer, reader = replace(IDENTITY, salt=b"one"), replace(IDENTITY, salt=b"two")
        memory.register(writer)
        node = make_node([data], parent=writer.scope)
        memory._parts.catalog.append(type(memory._parts.committer._facts)(nodes=[replace(node, scope=writer.scope)]))
        _look(memory, reader)
        assert [alarm.fields for alarm in memory.unread()] == [("salt",)]


def test_a_memory_that_is_found_once_raises_no_alarm_nor_does_a_first_run(tmp_path: Path) -> None:
    other = replace(IDENTITY, salt=b"tenant")
    with Memory(tmp_path / "m") as memory:
        _look(memory, IDENTITY)  # before anything is written
        _write(memory, IDENTITY)
        assert memory.unread() == ()
        memory.looked(other.scope, 0)
        assert len(memory.unread()) == 1
        memory.looked(IDENTITY.scope, 256)
        assert memory.unread() == ()
        assert memory.stats()["lookups_found"] == 1
