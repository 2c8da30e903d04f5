"""`numem why` and `numem replay`: what people and programs read of recorded decisions."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from numem import Memory
from numem.cli import app
from numem.lineage.decisions import DecisionLog
from numem.policy.decision import Alternative, Decision
from tests.cli_fixtures import error, output
from tests.evict_fixtures import SIZE
from tests.lineage_fixtures import IDENTITY, grown
from tests.store_fixtures import Chain, make_chain, put

GONE = b"\xfe" * 32


def numem_(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def decide(log: DecisionLog, request: str, subject: bytes, took: float | None) -> str:
    alternatives = (
        Alternative("recompute", 390.0, {"compute_tokens": 2049}),
        Alternative("restore:ssd", 41.0, {"tokens": 1792, "bytes": 7_340_032}),
        Alternative("restore:object", 95.0, {"tokens": 1792}, "insufficient pages"),
    )
    id = log.record(Decision("arrive", request, subject, "measured", {"tokens": 2049}, alternatives, "restore:ssd"))
    if took is not None:
        log.outcome(id, took, loaded=1792)
    return id


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def chain(home: Path) -> Chain:
    made = make_chain(2, SIZE)
    with Memory(home) as memory:
        put(memory, made)
        memory.promote([node.id for node, _ in made], "ssd")
        memory.residency.evict("ssd", 1)
        log = DecisionLog(memory)
        decide(log, "req-1", made[1][0].id, 44.0)
        decide(log, "req-2", GONE, None)
    return made


def test_why_of_a_request_says_what_was_done_and_what_else_there_was(home: Path, chain: Chain) -> None:
    said = numem_("why", "req-1", "--memory", home).stdout
    assert (
        "restored 1,792 of 2,049 tokens from ssd: predicted 41 ms, recompute 390 ms, took 44 ms\n"
        "  regret 0.0% (estimated: from predictions; not every alternative was executed)\n"
        "  - recompute: predicted 390 ms; compute_tokens 2,049\n"
        "  * restore:ssd: predicted 41 ms, took 44 ms; bytes 7,340,032, tokens 1,792\n"
        "  - restore:object: declined: insufficient pages (predicted 95 ms); tokens 1,792\n"
    ) in said
    document = output(numem_("why", "req-1", "--memory", home, "--json"))
    assert set(document) == {"memory", "request", "decisions", "warnings"}
    (one,) = document["decisions"]
    assert (one["kind"], one["choice"], one["subject"]) == ("arrive", "restore:ssd", chain[1][0].id.hex())
    assert one["outcomes"] == [{"choice": "restore:ssd", "cost_ms": 44.0, "terms": {"loaded": 1792}}]
    assert one["regret"] == {"value": 0.0, "label": "estimated"}
    assert one["said"][0].endswith("took 44 ms") and one["when"].endswith("Z")


def test_why_of_a_chunk_says_how_it_was_made_where_it_is_and_what_touched_it(home: Path, chain: Chain) -> None:
    first, last = (node for node, _ in chain)
    document = output(numem_("why", last.id.hex()[:10], "--memory", home, "--json"))
    assert document["chunk"] == last.id.hex()
    assert document["node"]["provenance"] == {"test": "store"}
    assert document["node"]["range"] == [16, 32] and document["node"]["published"].endswith("Z")
    assert [(c["tier"], c["state"]) for c in document["node"]["copies"]] == [("object", "ready"), ("ssd", "evicted")]
    assert [one["kind"] for one in document["decisions"]] == ["arrive", "evict", "promote"]
    # What leads to a boundary is touched by what is decided about it.
    above = output(numem_("why", first.id.hex(), "--memory", home, "--json"))
    assert [one["kind"] for one in above["decisions"]] == ["arrive", "promote"]
    people = numem_("why", last.id.hex(), "--memory", home).stdout
    assert f"chunk {last.id.hex()}\nrows [16, 32), published " in people and "made by: test store" in people
    assert "evicted 1 state (70,000 bytes) from ssd by interval: asked for" in people
    assert people.index("promoted 2 pieces") < people.index("evicted 1 state") < people.index("restored 1,792")


def test_why_knows_a_scope_and_ids_that_only_decisions_name(home: Path, chain: Chain) -> None:
    document = output(numem_("why", "fefe", "--memory", home, "--json"))
    assert (document["chunk"], document["node"]) == (GONE.hex(), None)
    assert [one["request"] for one in document["decisions"]] == ["req-2"]
    assert "it has not been measured" in numem_("why", GONE.hex(), "--memory", home).stdout
    with Memory(home) as memory:
        nodes = grown(memory)
    made = output(numem_("why", nodes["left"].id.hex(), "--memory", home, "--json"))
    assert made["node"]["identity"] == IDENTITY.describe()
    assert "no decision about it is recorded" in numem_("why", "left", "--memory", home).stdout


@pytest.mark.parametrize("command", [["why", "left"], ["replay"]])
def test_a_place_without_a_memory_is_named(home: Path, command: Sequence[str]) -> None:
    assert "no memory here" in error(numem_(*command, "--memory", home, "--json"), "NotFoundError")


def test_what_is_not_there_is_refused_with_what_to_do(home: Path, chain: Chain) -> None:
    assert "the name is empty" in error(numem_("why", "", "--memory", home, "--json"), "InputError")
    said = error(numem_("why", "req-9", "--memory", home, "--json"), "NotFoundError")
    assert said.startswith("'req-9': no request of this id has a decision here") and "`numem log` lists" in said
    with Memory(home) as memory:
        decide(DecisionLog(memory), "req-3", b"\xfe" * 31 + b"\x01", None)
    said = error(numem_("why", "fefe", "--memory", home, "--json"), "NotFoundError")
    assert said == "'fefe': 2 ids that decisions name begin so; give more digits"


def test_why_warns_of_a_memory_that_is_written_and_never_found(home: Path) -> None:
    """sglang#12092: 0 % hits are said where people ask why."""
    with Memory(home) as memory:
        node = grown(memory)["root"]
        memory.looked(b"\x09" * 32, 0)
    warning = output(numem_("why", node.id.hex(), "--memory", home, "--json"))["warnings"]
    assert len(warning) == 1
    assert f"4 chunks under scope {IDENTITY.scope.hex()[:16]}, 1 lookups under scope {'09' * 8}" in warning[0]
    assert "warning: written and never found" in numem_("why", node.id.hex(), "--memory", home).stdout


def test_replay_lists_policies_beside_what_was_done(home: Path, chain: Chain) -> None:
    document = output(numem_("replay", "--memory", home, "--json"))
    rows = {row["policy"]: row for row in document["arrive"]}
    assert set(rows) == {"recorded", "measured", "recompute", "restore", "two-ended", "hindsight"}
    assert (rows["recorded"]["cost_ms"], rows["recompute"]["cost_ms"]) == (44.0 + 41.0, 780.0)
    assert (rows["recompute"]["differ"], rows["measured"]["differ"]) == (2, 0)
    plans = {row["policy"]: row for row in document["evict"]}
    assert len(plans) == 8 and all(plans[name]["plans"] == 1 for name in plans)
    one = output(numem_("replay", "--policy", "recompute", "--kind", "arrive", "--memory", home, "--json"))
    assert [row["policy"] for row in one["arrive"]] == ["recorded", "recompute"] and one["evict"] == []
    people = numem_("replay", "--memory", home, "--kind", "arrive").stdout
    assert "restore or recompute" in people and "hindsight" in people and "estimated" in people


def test_replay_refuses_what_it_does_not_know(home: Path, chain: Chain) -> None:
    said = error(numem_("replay", "--policy", "best", "--memory", home, "--json"), "InputError")
    assert said.startswith("replay: no policy 'best'; known: arc, cost, hindsight")
    said = error(numem_("replay", "--kind", "drop", "--memory", home, "--json"), "InputError")
    assert said == "replay: decisions of kind 'drop' cannot be replayed; use arrive or evict"


def test_replay_of_a_memory_without_decisions_says_how_to_have_some(home: Path) -> None:
    with Memory(home):
        pass
    said = error(numem_("replay", "--memory", home, "--json"), "NotFoundError")
    assert "no decision of kind arrive or evict is recorded" in said
