"""A stateful model of the memory against dictionaries: whatever happens, in whatever order, and wherever it is cut short."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from numem.errors import CapacityError, NotFoundError, StoreError
from numem.store import barrier
from numem.store.memory import Memory
from numem.store.upkeep.doctor import diagnose
from tests.store_fixtures import COUNT, SCOPE, flip, make_node, payload, read_back, sidecars

SIZES = (1, 300, 4_096, 65_535, 65_536, 70_001)
PIECES = st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 4)), min_size=1, max_size=3)
PICK = st.integers(0, 100)


class StoreModel(RuleBasedStateMachine):
    """A piece reads as exactly its bytes or not at all; what was acknowledged and is kept reads unless bits were flipped;
    what was forgotten is gone.

    A crash is the state of the files at one step of an operation: they are copied there, and the copy is opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="numem-model-"))
        self.home = self.root / "0"
        self.memory = Memory(self.home)
        self.nodes: dict[bytes, tuple[bytes, int, list[bytes]]] = {}
        self.staged: set[bytes] = set()
        self.published: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.branches: dict[str, bytes] = {}
        self.damaged = False

    def teardown(self) -> None:
        self.memory.close()
        shutil.rmtree(self.root)

    # what is expected

    def _pick(self, number: int) -> bytes:
        ids = sorted(self.published)
        return ids[number % len(ids)]

    def _above(self, node: bytes) -> set[bytes]:
        found = set()
        while node in self.nodes:
            found.add(node)
            node = self.nodes[node][0]
        return found

    def _kept(self) -> set[bytes]:
        """What a collection of everything that nothing reaches leaves."""
        roots = [*self.pinned, *self.branches.values(), *(self.nodes[node][0] for node in self.staged)]
        reached: set[bytes] = set()
        for root in roots:
            node = root
            while node in self.published and node not in reached:
                reached.add(node)
                node = self.nodes[node][0]
        return reached

    def _look(self) -> None:
        """Take over what an operation that was cut short came to."""
        self.published = {node.id for node in self.memory.nodes()}
        self.staged = {node.id for node in self.memory.staged()}
        self.pinned = {claim.subject for claim in self.memory.residency.pins()}
        self.branches = {branch.name: branch.head for branch in self.memory.branches()}

    # what is done

    @rule(pieces=PIECES, number=PICK, through_spool=st.booleans())
    def add(self, pieces: list[tuple[int, int]], number: int, through_spool: bool) -> None:
        data = [payload(size, seed) for size, seed in pieces]
        parents = [SCOPE, *sorted(self.published)]
        parent = parents[number % len(parents)]
        start = 0 if parent == SCOPE else self.nodes[parent][1] + COUNT
        node = make_node(data, parent=parent, start=start, name="/".join(f"{size}.{seed}" for size, seed in pieces))
        self.nodes[node.id] = (parent, start, data)
        if through_spool:
            accepted = self.memory.stage(node, data)
            assert self.damaged or accepted == (node.id not in self.staged | self.published)
            if accepted or node.id not in self.published:
                self.staged.add(node.id)
        else:
            receipt = self.memory.publish(node, data).published.result(timeout=30)
            assert not receipt.missing and not receipt.conflict
            self.published.add(node.id)

    @rule()
    def publish_staged(self) -> None:
        report = self.memory.publish_staged()
        assert (report.missing, report.conflicts, report.nodes) == ((), (), len(self.staged))
        self.published |= self.staged
        self.staged.clear()

    @precondition(lambda self: self.published)
    @rule(number=PICK)
    def promote(self, number: int) -> None:
        node = self._pick(number)
        report = self.memory.promote([node])
        if not self.damaged:
            assert not report.failed
            assert self.memory.available(node, "ssd")

    @rule(nbytes=st.sampled_from((1, 70_000, 200_000)))
    def evict(self, nbytes: int) -> None:
        held = {node for node in self.pinned if self.memory.available(node, "ssd")}
        try:
            self.memory.residency.evict("ssd", nbytes)
        except CapacityError:
            pass
        assert self.damaged or all(self.memory.available(node, "ssd") for node in held)

    @precondition(lambda self: self.published)
    @rule(number=PICK)
    def pin(self, number: int) -> None:
        node = self._pick(number)
        self.memory.residency.pin([node], owner="model")
        self.pinned.add(node)

    @precondition(lambda self: self.pinned)
    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        node = sorted(self.pinned)[number % len(self.pinned)]
        assert self.memory.residency.unpin([node], owner="model") == 1
        self.pinned.discard(node)

    @precondition(lambda self: self.published)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        name = f"b{len(self.branches)}-{secrets.token_hex(4)}"
        self.branches[name] = self._pick(number)
        self.memory.create_branch(name, self.branches[name], actor="model", reason="test")

    @rule(everything=st.booleans())
    def maintain(self, everything: bool) -> None:
        self._maintain(everything)
        if everything:
            self.published = self._kept()

    def _maintain(self, everything: bool) -> None:
        self.memory.care.maintain(retain_s=0 if everything else None, grace_s=0, keep_versions_s=0, least=3)

    @precondition(lambda self: self.published)
    @rule(number=PICK)
    def forget(self, number: int) -> None:
        node = self._pick(number)
        gone = {other for other in self.nodes if node in self._above(other)}
        report = self.memory.care.forget(ids=[node], actor="model", reason="test")
        assert report.unreached == ()
        self.published -= gone
        self.staged -= gone
        self.pinned -= gone
        self.branches = {name: head for name, head in self.branches.items() if head not in gone}
        assert self.damaged or diagnose(self.home).ok
        for path in self.home.rglob("*"):
            assert not path.is_file() or node not in path.read_bytes() or "catalog" in path.parts, path

    @precondition(lambda self: bool(sidecars(self.home)))
    @rule(number=st.integers(0, 1000), at=st.integers(0, 10**7), bit=st.integers(0, 7))
    def flip_a_bit(self, number: int, at: int, bit: int) -> None:
        paths = sidecars(self.home)
        path = paths[number % len(paths)]
        if path.stat().st_size:
            flip(path, at % path.stat().st_size, bit)
            self.damaged = True

    @rule()
    def scrub(self) -> None:
        report = self.memory.care.scrub()
        assert self.damaged or report.ok

    @precondition(lambda self: self.damaged)
    @rule()
    def mend(self) -> None:
        """Scrub, then publish again what no copy is left of."""
        self.memory.care.scrub()
        for node in self.published:
            held = self.memory.get(node)
            assert held is not None
            self.memory.publish(held, self.nodes[node][2]).published.result(timeout=30)
        assert self.memory.care.scrub().ok
        assert self.memory.verify().ok
        self.damaged = False

    @rule()
    def reopen(self) -> None:
        self.memory.close()
        self.memory = Memory(self.home)
        assert self.memory.recovered == ()

    @rule(what=st.integers(0, 4), step=st.integers(1, 60), number=PICK, torn=st.booleans())
    def crash(self, what: int, step: int, number: int, torn: bool) -> None:
        """The process ends at a step of an operation; what was acknowledged before it holds."""
        before = set(self.published), dict(self.branches), set(self.pinned)
        copy = self.root / secrets.token_hex(4)
        left = [step]

        def observer(reached: str, where: str) -> None:
            left[0] -= 1
            if not left[0]:
                shutil.copytree(self.home, copy)

        data = [payload(70_001, 7), payload(300, 8)]
        new = make_node(data, name=f"crash-{step}")
        self.nodes[new.id] = (SCOPE, 0, data)
        if not self.published:
            what = 0
        operations: list[Callable[[], object]] = [
            lambda: self.memory.publish(new, data).published.result(timeout=30),
            self.memory.publish_staged,
            lambda: self.memory.promote([self._pick(number)]),
            lambda: self._maintain(True),
            lambda: self.memory.care.forget(ids=[self._pick(number)], actor="model", reason="crash"),
        ]
        doomed = {other for other in self.nodes if self.published and self._pick(number) in self._above(other)}
        kept = self._kept()
        self.memory.flush()
        end = barrier.observe(observer)
        try:
            operations[what]()
        finally:
            end()
        if copy.exists():
            self.memory.close()
            self.home = copy
            if torn:
                (self.home / "spool" / f".{secrets.token_hex(8)}.tmp").write_bytes(b"half")
                for files in (self.home / "object").glob("*.lance/data"):
                    (files / f"{secrets.token_hex(8)}.lance").write_bytes(bytes(100))
            self.memory = Memory(self.home)
            assert not [entry for entry in self.memory.recovered if entry.kind in ("lost", "rebuilt")]
        self._look()
        published, branches, pinned = before
        gone = doomed if what == 4 else published - kept if what == 3 else set()
        assert self.published >= published - gone
        assert {name: head for name, head in branches.items() if head not in gone}.items() <= self.branches.items()
        assert self.pinned >= pinned - gone
        if what == 4:
            # A deletion that was cut short is asked for again; one that came to its end has no rows left.
            node = min(doomed & published, key=lambda n: self.nodes[n][1])
            with contextlib.suppress(NotFoundError):
                self.memory.care.forget(ids=[node], actor="model", reason="again")
            self._look()
            assert not doomed & self.published
        assert self.damaged or diagnose(self.home).ok, diagnose(self.home).findings

    @precondition(lambda self: self.nodes)
    @rule(number=PICK)
    def read(self, number: int) -> None:
        node_id = sorted(self.nodes)[number % len(self.nodes)]
        data = self.nodes[node_id][2]
        node = self.memory.get(node_id)
        assert (node is None) == (node_id not in self.published)
        if node is None:
            assert not self.memory.available(node_id)
            return
        try:
            assert read_back(self.memory, node, [len(d) for d in data]) == data
        except StoreError:
            assert self.damaged

    @invariant()
    def agrees(self) -> None:
        assert {node.id for node in self.memory.nodes()} == self.published
        assert {node.id for node in self.memory.staged()} == self.staged
        assert {branch.name: branch.head for branch in self.memory.branches()} == self.branches
        assert {claim.subject for claim in self.memory.residency.pins()} == self.pinned

    @precondition(lambda self: not self.damaged)
    @rule()
    def examine(self) -> None:
        """One visible row per causal id, and nothing that is not as it should be."""
        self.memory.flush()
        report = diagnose(self.home)
        assert report.ok and not [finding for finding in report.findings if "twice" in finding.what]
        assert self.memory.verify().ok


StoreModel.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=18,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestStoreModel = StoreModel.TestCase


class LongStoreModel(StoreModel):
    """The same, for longer."""


LongStoreModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLongStoreModel = pytest.mark.slow(pytest.mark.stress(LongStoreModel.TestCase))
