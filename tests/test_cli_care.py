"""The commands that care for a memory: what they print, what they change, and their exit codes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from numem import Memory
from numem.cli import app
from numem.environment import parse_bytes, parse_tiers, storage_options
from numem.errors import InputError
from numem.identity.chain import plan
from numem.job.batch import Batch, Item, save_batch
from numem.job.sharing import Prefix
from numem.store.config import TierSpec
from numem.store.upkeep.maintain import lane
from tests.cli_fixtures import error, output
from tests.store_fixtures import SCOPE, Chain, flip, make_chain, put

NBYTES = 70_000
Run = Callable[..., Result]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def chain(home: Path) -> Chain:
    """Three nodes in the home tier and in ssd, with a branch on the last."""
    made = make_chain(3, NBYTES)
    with Memory(home) as memory:
        put(memory, made)
        memory.promote([node.id for node, _ in made], "ssd")
        memory.create_branch("main", made[-1][0].id, actor="test", reason="test")
    return made


@pytest.fixture
def numem(home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("NUMEM_TIERS", "NUMEM_NODE", "NUMEM_LOCAL", "NUMEM_STORAGE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments), "--memory", str(home)])


def test_tiers_say_what_they_hold_and_should_hold(numem: Run, home: Path, chain: Chain) -> None:
    document = output(numem("tiers", "--json"))
    assert document["memory"] == str(home)
    held, near = document["tiers"]
    assert {k: held[k] for k in ("name", "url", "node", "write", "capacity", "pieces", "used_bytes", "volumes")} == {
        "name": "object",
        "url": str(home / "object"),
        "node": "",
        "write": "demand",
        "capacity": None,
        "pieces": 3,
        "used_bytes": 3 * NBYTES,
        "volumes": 1,
    }
    assert (held["desired"], held["actual"], held["quarantined"]) == (3, 3, 0)
    assert held["file_bytes"] > 3 * NBYTES
    assert (near["name"], near["node"], near["desired"], near["actual"]) == ("ssd", "local", 0, 0)
    people = numem("tiers")
    assert people.exit_code == 0 and "210,000" in people.stdout and f"object: {home / 'object'}" in people.stdout


def test_demands_are_made_served_and_cancelled(numem: Run, home: Path, chain: Chain) -> None:
    ids = [node.id.hex() for node, _ in chain]
    assert output(numem("evict", "ssd", 3 * NBYTES, "--json"))["bytes"] == 3 * NBYTES
    made = output(numem("demand", "main", "--tier", "ssd", "--priority", 5, "--owner", "me", "--ttl", 1000, "--json"))
    assert made == {"demanded": ids[2:], "tier": "ssd", "node": None, "priority": 5, "owner": "me", "ttl_s": 1000}
    (listed,) = output(numem("demands", "--json"))["demands"]
    assert listed.pop("expires").endswith("Z")
    assert listed == {"id": ids[2], "tier": "ssd", "node": "local", "priority": 5, "owner": "me"}
    near = output(numem("tiers", "--json"))["tiers"][1]
    assert (near["desired"], near["actual"]) == (1, 0)
    done = output(numem("reconcile", "--json"))
    assert done == {
        "ready": ids[2:],
        "satisfied": 0,
        "in_progress": 0,
        "failed": {},
        "suppressed": [],
        "unsatisfiable": [],
    }
    with Memory(home) as memory:
        assert memory.available(chain[2][0].id, "ssd") and not memory.available(chain[0][0].id, "ssd")
    cancelled = output(numem("cancel", ids[2], "--tier", "ssd", "--owner", "me", "--json"))
    assert cancelled == {"cancelled": 1, "tier": "ssd", "node": None, "owner": "me"}
    assert output(numem("demands", "--json")) == {"demands": []}


def test_a_demand_that_cannot_be_met_gives_exit_1(numem: Run, chain: Chain) -> None:
    absent = "ab" * 32
    numem("demand", absent, "--tier", "ssd", "--owner", "me")
    (stuck,) = output(numem("reconcile", "--json"), 1)["unsatisfiable"]
    assert (stuck["id"], stuck["tier"], stuck["owner"]) == (absent, "ssd", "me") and "publish it first" in stuck[
        "reason"
    ]
    people = numem("reconcile")
    assert people.exit_code == 1 and "publish it first" in people.stdout


def test_pins_keep_from_eviction(numem: Run, chain: Chain) -> None:
    ids = [node.id.hex() for node, _ in chain]
    assert output(numem("pin", ids[0], "--tier", "ssd", "--owner", "me", "--json")) == {
        "pinned": ids[:1],
        "tier": "ssd",
        "owner": "me",
        "ttl_s": None,
    }
    assert output(numem("pins", "--json")) == {
        "pins": [{"id": ids[0], "tier": "ssd", "node": "local", "owner": "me", "expires": None}]
    }
    assert ids[0][:12] in numem("pins").stdout
    refused = error(numem("evict", "ssd", 3 * NBYTES, "--json"), "CapacityError")
    assert "pinned" in refused
    gone = output(numem("evict", "ssd", "100kB", "--json"))
    assert set(gone) == {"tier", "policy", "reason", "nodes", "pieces", "bytes"}
    assert gone["nodes"] == ids[:0:-1] and gone["pieces"] == 2 and gone["bytes"] == 2 * NBYTES
    assert output(numem("unpin", ids[0], "--tier", "ssd", "--owner", "me", "--json"))["unpinned"] == 1
    assert output(numem("evict", "ssd", 1, "--json"))["nodes"] == ids[:1]


def test_maintain_says_bytes_before_and_after(numem: Run, home: Path, chain: Chain) -> None:
    with Memory(home) as memory:
        put(memory, make_chain(4, NBYTES, seed=7, name="unreached"))
    document = output(numem("maintain", "--retain", 0, "--grace", 0, "--versions", 0, "--least", 0, "--json"))
    assert set(document) == {
        *("memory", "catalog_bytes", "payload_bytes", "retired", "evicted", "evicted_bytes", "volumes_removed"),
        *("volumes_rewritten", "orphan_bytes", "fragments", "rows_dropped", "version_bytes", "ledger_bytes"),
        *("spool_files", "epoch", "ms"),
    }
    assert (document["retired"], document["evicted"], document["evicted_bytes"]) == (4, 4, 4 * NBYTES)
    assert (document["volumes_removed"], document["volumes_rewritten"], document["epoch"]) == (1, 1, 1)
    payload, catalog = document["payload_bytes"], document["catalog_bytes"]
    assert payload["before"] - payload["after"] > 3 * NBYTES and catalog["after"] < catalog["before"]
    with Memory(home) as memory:
        assert len(memory.nodes()) == 3 and memory.verify().ok
    people = numem("maintain")
    assert people.exit_code == 0 and "given back" in people.stdout and "epoch 2" in people.stdout


def test_a_second_maintainer_is_told(numem: Run, home: Path, chain: Chain) -> None:
    with Memory(home) as memory, lane(memory.care._parts):
        assert "another process maintains" in error(numem("maintain", "--json"), "LeaseHeldError")


def test_scrub_repairs_and_says_so(numem: Run, home: Path, chain: Chain) -> None:
    whole = output(numem("scrub", "--json"))
    assert set(whole) == {
        *("memory", "ok", "checked", "bytes", "whole", "bad", "repaired", "unrepairable", "damaged", "ms")
    }
    assert (whole["ok"], whole["checked"], whole["bytes"], whole["whole"]) == (True, 6, 6 * NBYTES, True)
    content = _damage(home, chain, "ssd")
    found = output(numem("scrub", "--no-repair", "--json"), 1)
    assert (found["ok"], found["repaired"]) == (False, 0)
    assert [(bad["content"], bad["tier"]) for bad in found["bad"]] == [(content, "ssd")]
    mended = output(numem("scrub", "--tier", "ssd", "--json"))
    assert (mended["ok"], mended["repaired"], mended["bad"]) == (True, 1, [])
    some = output(numem("scrub", "--tier", "object", "--budget-bytes", "80kB", "--json"))
    assert (some["checked"], some["whole"]) == (1, False)
    with Memory(home) as memory:  # small budgets reach every tier in turn
        memory.care.scrub()
        before = {tier: memory.records("scrub", tier.encode())[-1] for tier in ("object", "ssd@local")}
        memory.care.scrub(budget_bytes=1)
        memory.care.scrub(budget_bytes=1)
        assert all(memory.records("scrub", tier.encode())[-1] != last for tier, last in before.items())
    assert "the next scrub goes on there" in numem("scrub", "--budget-s", 0).stdout
    assert "no tier 'x'" in error(numem("scrub", "--tier", "x", "--json"), "NotFoundError")


def test_what_cannot_be_repaired_gives_exit_1(numem: Run, home: Path, chain: Chain) -> None:
    numem("evict", "ssd", 3 * NBYTES)
    content = _damage(home, chain, "object")
    document = output(numem("scrub", "--json"), 1)
    assert list(document["unrepairable"]) == [content] and "recompute" in document["unrepairable"][content]
    people = numem("scrub")
    assert people.exit_code == 1 and people.stdout.startswith("DAMAGED")


def test_archive_copies_closed_volumes(
    numem: Run, home: Path, chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no archive 'cold'" in error(numem("archive", "cold", "--json"), "NotFoundError")
    monkeypatch.setenv("NUMEM_TIERS", f"object={home / 'object'},cold={tmp_path / 'cold'};write=archive")
    document = output(numem("archive", "cold", "--close", "--json"))
    assert set(document) == {"memory", "archive", "volumes", "held", "bytes", "failed", "ms"}
    assert (len(document["volumes"]), document["held"], document["failed"]) == (1, 0, {})
    assert document["bytes"] > 3 * NBYTES
    assert sum(path.stat().st_size for path in (tmp_path / "cold").rglob("*") if path.is_file()) == document["bytes"]
    assert output(numem("archive", "cold", "--json"))["held"] == 1
    cold = output(numem("tiers", "--json"))["tiers"][1]
    assert (cold["write"], cold["volumes"], cold["pieces"], cold["file_bytes"]) == ("archive", 1, 3, document["bytes"])


def _damage(home: Path, chain: Chain, tier: str) -> str:
    """Flip a bit of the second node's piece in a tier; its content id."""
    content = chain[1][0].pieces[0]
    with Memory(home) as memory:
        (place,) = [p for p in memory.placements(content) if p.tier == tier]
        path = memory.care._parts.tiers[tier].volume(place.volume).sidecar(place.file, place.blob)
    assert path is not None
    flip(path, place.offset + 100)
    return content.hex()


# forget

TOKENS = tuple(range(300))


def _job(memory: Memory, scope: bytes, tokens: tuple[int, ...]) -> Batch:
    """A batch of one prompt as the main job leaves it, with outputs of two runs."""
    batch = Batch(f"{tokens[0]:032x}", scope.hex(), "model", (Item("a", tokens),), (Prefix(tokens[:-1], (0,)),))
    save_batch(memory, batch)
    for run in ("r1", "r2"):
        directory = memory.local / "outputs" / batch.id / run
        directory.mkdir(parents=True)
        (directory / "completions.jsonl").write_text("{}\n")
    return batch


def test_forget_a_scope_with_its_batches_and_outputs(numem: Run, home: Path, chain: Chain) -> None:
    with Memory(home) as memory:
        mine, other = _job(memory, SCOPE, TOKENS), _job(memory, bytes(32), tuple(range(1, 300)))
    document = output(numem("forget", "--scope", SCOPE.hex(), "--reason", "asked", "--yes", "--json"))
    assert set(document) == {
        *("memory", "nodes", "pieces", "shared", "volumes", "staged", "bytes", "batches", "files", "unreached")
    }
    assert (document["nodes"], document["pieces"], document["shared"], document["unreached"]) == (3, 3, 0, [])
    assert (document["batches"], document["files"]) == ([mine.id], 3)
    assert [path.stem for path in (home / "batches").iterdir()] == [other.id]
    assert [path.name for path in (home / "outputs").iterdir()] == [other.id]
    with Memory(home) as memory:
        assert memory.nodes() == () and memory.branches() == ()
        (record,) = memory.records("forgotten")
        assert record.body["reason"] == "asked"


def test_forget_a_node_takes_the_batches_that_lead_through_it(numem: Run, home: Path) -> None:
    """The prompt's first chunk is published as a state; a batch that shares no state with it stays."""
    (first, *_) = plan(SCOPE, TOKENS)
    node = _as_node(first.id)
    with Memory(home) as memory:
        put(memory, [node])
        mine, other = _job(memory, SCOPE, TOKENS), _job(memory, SCOPE, tuple(range(1, 300)))
    (home / "dagster").mkdir()
    document = output(numem("forget", "--node", first.id.hex()[:12], "--yes", "--json"), 1)
    assert (document["nodes"], document["batches"]) == (1, [mine.id])
    (unreached,) = document["unreached"]
    assert unreached.startswith(f"{home / 'dagster'}: ") and "previews" in unreached
    assert [path.stem for path in (home / "batches").iterdir()] == [other.id]


def test_forget_goes_on_where_an_earlier_attempt_ended(numem: Run, home: Path) -> None:
    (first, *_) = plan(SCOPE, TOKENS)
    with Memory(home) as memory:
        put(memory, [_as_node(first.id)])
        batch = _job(memory, SCOPE, TOKENS)
        memory.care.forget(ids=[first.id], actor="test", reason="killed after this")
    document = output(numem("forget", "--node", first.id.hex(), "--yes", "--json"))
    assert (document["nodes"], document["batches"]) == (0, [batch.id])
    assert "no node" in error(numem("forget", "--node", first.id.hex(), "--yes", "--json"), "NotFoundError")


def test_a_batch_that_cannot_be_read_is_named(numem: Run, home: Path, chain: Chain) -> None:
    (home / "batches").mkdir()
    damaged = home / "batches" / f"{7:032x}.json"
    damaged.write_text("{")
    (unreached,) = output(numem("forget", "--branch", "main", "--yes", "--json"), 1)["unreached"]
    assert str(damaged) in unreached and damaged.exists()


def test_forget_asks_first(numem: Run, home: Path, chain: Chain) -> None:
    arguments = [*("forget", "--branch", "main"), "--memory", str(home)]
    refused = CliRunner().invoke(app, arguments, input="n\n")
    assert refused.exit_code == 1 and "for good?" in refused.stdout
    with Memory(home) as memory:
        assert len(memory.nodes()) == 3
    agreed = CliRunner().invoke(app, arguments, input="y\n")
    assert agreed.exit_code == 0 and "3 states and 3 pieces" in agreed.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("forget", "--yes"),
        ("forget", "--scope", SCOPE.hex(), "--branch", "main", "--yes"),
        ("forget", "--scope", "abc", "--yes"),
        ("forget", "--branch", "main"),
        ("evict", "ssd"),
        ("demand", "main"),
        ("maintain", "--dead", "2"),
    ],
)
def test_wrong_use_is_exit_2_and_changes_nothing(
    numem: Run, home: Path, chain: Chain, arguments: tuple[str, ...]
) -> None:
    assert set(output(numem(*arguments, "--json"), 2)) == {"error", "type"}
    with Memory(home) as memory:
        assert len(memory.nodes()) == 3


def test_what_only_looks_works_without_write_access(
    numem: Run, home: Path, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numem.store.workspace.os.access", lambda path, mode: False)
    head = chain[-1][0].id.hex()
    assert [tier["actual"] for tier in output(numem("tiers", "--json"))["tiers"]] == [3, 0]
    assert output(numem("verify", "--json"))["nodes"] == 3
    assert len(output(numem("log", "--json"))["nodes"]) == 3
    assert output(numem("show", "main", "--json"))["branches"] == ["main"]
    assert output(numem("pins", "--json")) == {"pins": []}
    assert output(numem("demands", "--json")) == {"demands": []}
    for changes in (("maintain",), ("scrub",), ("pin", head), ("fork", head, "--branch", "b")):
        assert "write access" in error(numem(*changes, "--json"), "ReadOnlyError")


def test_commands_need_a_memory(tmp_path: Path) -> None:
    for command in (["tiers"], ["maintain"], ["scrub"], ["pins"], ["demands"], ["reconcile"], ["evict", "ssd", "1"]):
        result = CliRunner().invoke(app, [*command, "--json", "--memory", str(tmp_path / "absent")])
        error(result, "NotFoundError")
    assert not (tmp_path / "absent").exists()


def test_sizes_and_tiers_are_read_as_people_write_them() -> None:
    sizes = {"0": 0, "12": 12, "64MiB": 64 << 20, "1.5kB": 1500, "200 GB": 200 * 10**9, "3t": 3 * 10**12}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "-1", "many", "1e3", "1XB"):
        with pytest.raises(InputError, match="not a number of bytes"):
            parse_bytes(text)
    assert parse_tiers("a=/x; capacity=1GiB ;policy=lru, b=s3://y/z;write=selective") == {
        "a": TierSpec("/x", 1 << 30, "lru"),
        "b": TierSpec("s3://y/z", write="selective"),
    }
    for wrong in ("a=/x;color=red", "a=/x;capacity", "a=/x,a=/y", "a=/x;policy=lru;policy=arc"):
        with pytest.raises(InputError, match="NUMEM_TIERS"):
            parse_tiers(wrong)


def test_storage_options_are_json_and_never_repeated(numem: Run, chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMEM_STORAGE_OPTIONS", '{"aws_region": "us-east-1"}')
    assert storage_options() == {"aws_region": "us-east-1"} and numem("tiers").exit_code == 0
    for wrong in ("secret", '["secret"]', '{"key": 1}'):
        monkeypatch.setenv("NUMEM_STORAGE_OPTIONS", wrong)
        message = error(numem("tiers", "--json"), "InputError")
        assert message.startswith("NUMEM_STORAGE_OPTIONS: not ") and "secret" not in message


def _as_node(id: bytes) -> tuple[Any, list[bytes]]:
    """A node of the store under a given causal id."""
    ((node, data),) = make_chain(1, NBYTES, seed=3)
    return replace(node, id=id, marks=(id,)), data
