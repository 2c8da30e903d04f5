"""Deletion that is proved: an incompressible marker is found in raw files before, and in none afterwards."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from numem.errors import InputError, NotFoundError
from numem.state.node import Node
from numem.store import barrier
from numem.store.memory import Memory
from numem.store.upkeep.doctor import diagnose, repair
from tests.store_fixtures import SCOPE, Chain, assert_readable, make_chain, payload, put, run_children

MARKER = payload(48, 99)


def _marked(chain: Chain) -> Chain:
    """The chain with the marker where a tenant's secrets are: in the payload, in the tokens, in the provenance."""
    marked: Chain = []
    from tests.store_fixtures import make_node

    parent = chain[0][0].parent
    for number, (node, (data,)) in enumerate(chain):
        secret = [MARKER + data[len(MARKER) :]]
        new = make_node(secret, parent=parent, start=node.start, name=f"secret{number}")
        new = replace(new, applied=MARKER * 4, provenance={"prompt": MARKER.hex()})
        marked.append((new, secret))
        parent = new.id
    return marked


def _files_with(root: Path, *needles: bytes) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*"))
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    ]


def _holding(root: Path) -> list[str]:
    return _files_with(root, MARKER, MARKER.hex().encode())


def _other_scope(chain: Chain, scope: bytes) -> Chain:
    return [(replace(node, scope=scope), data) for node, data in chain]


def test_a_branch_is_forgotten_with_every_trace(tmp_path: Path) -> None:
    """Payload, tokens and provenance leave volumes, both tiers, spool, ledger and all versions of the catalog."""
    kept = make_chain(3, name="kept")
    secret = _marked(make_chain(4, seed=2))
    staged = _marked(make_chain(5, seed=2))[4]
    with Memory(tmp_path) as memory:
        put(memory, kept)
        put(memory, secret)
        memory.create_branch("keep", kept[-1][0].id, actor="test", reason="test")
        memory.create_branch("tenant", secret[-1][0].id, actor="test", reason="test")
        memory.promote([node.id for node, _ in (*kept, *secret)], "ssd")
        memory.record("note", secret[1][0].id, {"text": MARKER.hex()})
        memory.flush()
        memory.stage(*staged)
    places = {name.split("/")[0] for name in _holding(tmp_path)}
    assert places == {"catalog", "object", "nodes", "spool"}
    with Memory(tmp_path) as memory:
        report = memory.care.forget(branch="tenant", actor="test", reason="asked to")
        assert (report.nodes, report.pieces, report.staged) == (5, 4, 1)
        assert report.unreached == ()
        assert _holding(tmp_path) == []
        assert_readable(memory, kept)
        assert_readable(memory, kept, "ssd")
        assert [branch.name for branch in memory.branches()] == ["keep"]
        assert memory.records("note") == ()
        (record,) = memory.records("forgotten")
        assert record.body["nodes"] == 5
        assert memory.verify().ok
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert memory.nodes() == tuple(node for node, _ in kept)
        assert_readable(memory, kept)
    assert _holding(tmp_path) == []


def test_a_scope_is_forgotten_and_shared_pieces_stay(tmp_path: Path) -> None:
    """Two tenants with one piece in common: the other keeps it, byte-equal."""
    secret = _marked(make_chain(3))
    other = make_chain(2, seed=7, name="other")
    common = secret[0][1]
    shared = replace(make_chain(1, name="common")[0][0], pieces=secret[0][0].pieces, fields=secret[0][0].fields)
    tenant = bytes(31) + b"t"
    with Memory(tmp_path) as memory:
        put(memory, [(replace(node, scope=tenant), data) for node, data in secret])
        put(memory, other)
        put(memory, [(shared, common)])
        report = memory.care.forget(scope=tenant, actor="test", reason="asked to")
        assert (report.nodes, report.pieces, report.shared) == (3, 2, 1)
        assert_readable(memory, [*other, (shared, common)])
        assert {node.scope for node in memory.nodes()} == {SCOPE}
        assert [name for name in _files_with(tmp_path, MARKER * 2)] == []  # tokens: gone, whoever shares the payload
        assert [Path(name).suffix for name in _files_with(tmp_path, MARKER)] == [".blob"]


def test_nodes_are_forgotten_with_what_builds_on_them(tmp_path: Path) -> None:
    """A child without its parent restores nothing."""
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        assert memory.care.forget(ids=[chain[2][0].id], actor="test", reason="test").nodes == 2
        assert memory.nodes() == tuple(node for node, _ in chain[:2])
        assert_readable(memory, chain[:2])


def test_a_forgotten_node_can_be_published_again(tmp_path: Path) -> None:
    """Deletion is of what was there, not a ban."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.care.forget(ids=[chain[0][0].id], actor="test", reason="test")
        assert memory.nodes() == ()
        assert put(memory, chain).stored == 2
        assert_readable(memory, chain)
    with Memory(tmp_path) as memory:
        assert_readable(memory, chain)


def test_what_a_running_process_writes_is_named(tmp_path: Path) -> None:
    """Its open volume cannot be changed from here; after it ended, the next call completes the deletion."""
    secret = _marked(make_chain(2))
    with Memory(tmp_path) as memory:
        with Memory(tmp_path) as writer:
            put(writer, secret)
            report = memory.care.forget(ids=[secret[0][0].id], actor="test", reason="test")
            assert len(report.unreached) == 1
            assert "running process" in report.unreached[0]
            assert writer.nodes() == ()
        assert memory.care.collect(grace_s=0, dead_fraction=0).removed == 1
        assert _holding(tmp_path) == []


def test_what_to_forget_must_be_said_and_be_there(tmp_path: Path) -> None:
    """Typed errors, nothing changed."""
    with Memory(tmp_path) as memory:
        put(memory, make_chain(1))
        with pytest.raises(InputError):
            memory.care.forget(actor="test", reason="test")
        for what in ({"branch": "none"}, {"scope": bytes(32)}, {"ids": [bytes(32)]}):
            with pytest.raises(NotFoundError):
                memory.care.forget(**what, actor="test", reason="test")
        assert len(memory.nodes()) == 1


def _publish_and_die(home: str) -> None:
    from tests.store_fixtures import die_at

    with Memory(home) as memory:
        for node, data in _marked(make_chain(2)):
            memory.stage(node, data)
        die_at("written", 1)
        memory.publish_staged()


@pytest.mark.crash
def test_what_a_crash_left_behind_goes_too(tmp_path: Path) -> None:
    """Payload written and never committed lies in no catalog; the spool says whose it was."""
    assert run_children(_publish_and_die, [(str(tmp_path),)]) == [-9]
    assert any(name.endswith(".blob") for name in _holding(tmp_path))
    nodes: list[Node] = []
    with Memory(tmp_path) as memory:
        nodes = list(memory.staged())
        put(memory, make_chain(1, seed=5, name="kept"))
        report = memory.care.forget(scope=SCOPE, actor="test", reason="test")
        assert report.staged == len(nodes) == 2
        assert _holding(tmp_path) == []


def test_a_child_staged_elsewhere_does_not_outlive_its_forgotten_parent(tmp_path: Path) -> None:
    """Another node's spool is out of reach; what is in it is refused, and leaves the spool, when it would be published."""
    chain = make_chain(3)
    other = tmp_path / "other"
    with Memory(tmp_path / "home") as memory, Memory(tmp_path / "home", node="b", local=other) as elsewhere:
        put(memory, chain[:1])
        for entry in chain[1:]:
            elsewhere.stage(*entry)
        memory.care.forget(ids=[chain[0][0].id], actor="test", reason="test")
        report = elsewhere.publish_staged()
        assert set(report.missing) == {node.id for node, _ in chain[1:]}
        assert elsewhere.nodes() == ()
        assert elsewhere.staged() == ()
        assert not any(path.is_file() for name in ("spool", "quarantine") for path in (other / name).glob("*"))
        assert not list(tmp_path.rglob("*.blob"))
        assert put(elsewhere, chain).nodes == 3  # from its beginning it may come again
        assert_readable(memory, chain)


def test_a_memory_that_was_reopened_forgets_from_all_its_volumes(tmp_path: Path) -> None:
    """What stays of the first volume is not written into the last one, which an earlier process left open and which is
    about to go as well."""
    kept = make_chain(2, name="kept")
    secret = _marked(make_chain(2, seed=2))
    with Memory(tmp_path) as memory:
        put(memory, [kept[0], secret[0]])
        memory.care.close_volumes()
        put(memory, [kept[1], secret[1]])
    with Memory(tmp_path) as memory:
        report = memory.care.forget(ids=[secret[0][0].id], actor="test", reason="test")
        assert (report.nodes, report.volumes, report.unreached) == (2, 2, ())
        assert _holding(tmp_path) == []
        assert_readable(memory, kept)


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Step of a deletion -> the memory as a crash right after it leaves it."""
    root = tmp_path_factory.mktemp("cut")
    home = root / "home"
    secret = _marked(make_chain(2, seed=2))
    found: dict[str, Path] = {}

    def observer(step: str, what: str) -> None:
        place = f"{step} {what}"
        if place not in found and place in CUTS:
            found[place] = Path(shutil.copytree(home, root / str(len(found))))

    with Memory(home) as memory:
        put(memory, [*make_chain(4, name="kept"), *secret])
        memory.create_branch("tenant", secret[-1][0].id, actor="test", reason="test")
        memory.stage(*_marked(make_chain(3, seed=2))[2])
        end = barrier.observe(observer)
        memory.care.forget(branch="tenant", actor="test", reason="test")
        end()
    return found


CUTS = (
    "committed catalog/retired",
    "volume unmarked local.w000.000001",
    "written catalog/nodes",
    "committed catalog/nodes",
)


@pytest.mark.crash
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("by", ["repair", "again", "another", "repair after maintenance"])
def test_a_deletion_that_was_cut_short_is_never_lost_sight_of(
    tmp_path: Path, cut_short: dict[str, Path], cut: str, by: str
) -> None:
    """Wherever it ended, and whatever maintenance did since: the doctor knows, and a repair, the same deletion asked for
    again or any other takes every trace from the files."""
    home = Path(shutil.copytree(cut_short[cut], tmp_path / "home"))
    kept = make_chain(4, name="kept")
    secret = _marked(make_chain(3, seed=2))
    if "maintenance" in by:
        with Memory(home) as memory:
            memory.care.maintain(grace_s=0, dead_fraction=0.99, keep_versions_s=3600, least=2)
    assert "3 nodes that were to be forgotten" in diagnose(home).of("repairable")[0].what
    if by == "again":
        with Memory(home) as memory:
            assert memory.care.forget(ids=[secret[0][0].id], actor="test", reason="test").nodes == 3
    elif by == "another":
        with Memory(home) as memory:
            kept = kept[:3]
            other = make_chain(4, name="kept")[3][0].id
            assert memory.care.forget(ids=[other], actor="test", reason="test").nodes == 4
    else:
        assert repair(home).ok
    assert _holding(home) == []
    assert diagnose(home).ok
    with Memory(home) as memory:
        assert memory.nodes() == tuple(node for node, _ in kept) and memory.staged() == ()
        assert_readable(memory, kept)
        with pytest.raises(NotFoundError):
            memory.care.forget(ids=[secret[0][0].id], actor="test", reason="test")
