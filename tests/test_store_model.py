"""A stateful model of the memory against a dictionary."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from numem.errors import StoreError
from numem.store.memory import Memory
from tests.store_fixtures import COUNT, SCOPE, flip, make_node, payload, sidecars

SIZES = (1, 300, 4_096, 65_535, 65_536, 70_001)
PIECES = st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 4)), min_size=1, max_size=4)


class StoreModel(RuleBasedStateMachine):
    """Whatever happens: a piece reads as exactly its bytes or not at all, and undamaged pieces always read."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="numem-model-"))
        self.home = self.root / "home"
        self.memory = Memory(self.home)
        self.nodes: dict[bytes, tuple[int, list[bytes]]] = {}
        self.known = [SCOPE]
        self.staged: set[bytes] = set()
        self.published: set[bytes] = set()
        self.damaged = False

    def teardown(self) -> None:
        self.memory.close()
        shutil.rmtree(self.root)

    def _pick(self, number: int) -> bytes:
        ids = sorted(self.nodes)
        return ids[number % len(ids)]

    @rule(pieces=PIECES, number=st.integers(0, 100), through_spool=st.booleans())
    def add(self, pieces: list[tuple[int, int]], number: int, through_spool: bool) -> None:
        data = [payload(size, seed) for size, seed in pieces]
        parent = self.known[number % len(self.known)]
        start = 0 if parent == SCOPE else self.nodes[parent][0] + COUNT
        name = "/".join(f"{size}.{seed}" for size, seed in pieces)
        node = make_node(data, parent=parent, start=start, name=name)
        new = node.id not in self.nodes
        self.nodes[node.id] = (start, data)
        if new:
            self.known.append(node.id)
        if through_spool:
            accepted = self.memory.stage(node, data)
            if not self.damaged:
                assert accepted == (node.id not in self.staged | self.published)
            if accepted or node.id not in self.published:
                self.staged.add(node.id)
        else:
            receipt = self.memory.publish(node, data).published.result(timeout=30)
            assert not receipt.missing and not receipt.conflict
            assert receipt.stored + receipt.reused == len(data)
            self.published.add(node.id)

    @rule()
    def publish_staged(self) -> None:
        report = self.memory.publish_staged()
        assert report.missing == () and report.conflicts == ()
        assert report.nodes == len(self.staged)
        assert report.logical_bytes == sum(len(d) for node in self.staged for d in self.nodes[node][1])
        self.published |= self.staged
        self.staged.clear()

    @precondition(lambda self: self.published)
    @rule(number=st.integers(0, 100))
    def promote(self, number: int) -> None:
        node = sorted(self.published)[number % len(self.published)]
        report = self.memory.promote([node])
        if not self.damaged:
            assert not report.failed
            assert self.memory.available(node, "ssd")

    @precondition(lambda self: bool(sidecars(self.home)))
    @rule(number=st.integers(0, 1000), at=st.integers(0, 10**7), bit=st.integers(0, 7))
    def damage(self, number: int, at: int, bit: int) -> None:
        paths = sidecars(self.home)
        path = paths[number % len(paths)]
        if path.stat().st_size:
            flip(path, at % path.stat().st_size, bit)
            self.damaged = True

    @rule()
    def reopen(self) -> None:
        self.memory.close()
        self.memory = Memory(self.home)
        assert self.memory.recovered == ()

    @rule()
    def verify(self) -> None:
        report = self.memory.verify()
        assert report.nodes == len(self.published)
        if not self.damaged:
            assert report.ok

    @precondition(lambda self: self.damaged)
    @rule()
    def repair(self) -> None:
        """Publishing everything again mends the home tier."""
        self.memory.verify()
        for node in self.published:
            held = self.memory.get(node)
            assert held is not None
            self.memory.publish(held, self.nodes[node][1]).published.result(timeout=30)
        self.memory.promote(sorted(self.published))
        self.damaged = False

    @precondition(lambda self: self.nodes)
    @rule(number=st.integers(0, 100))
    def read(self, number: int) -> None:
        node_id = self._pick(number)
        data = self.nodes[node_id][1]
        node = self.memory.get(node_id)
        assert (node is None) == (node_id not in self.published)
        if node is None:
            assert not self.memory.available(node_id)
            return
        buffers = [bytearray(len(d)) for d in data]
        try:
            self.memory.read(list(zip(node.pieces, buffers, strict=True)))
        except StoreError:
            assert self.damaged
            return
        assert [bytes(buffer) for buffer in buffers] == data

    @invariant()
    def catalog_agrees(self) -> None:
        assert {node.id for node in self.memory.nodes()} == self.published
        assert {node.id for node in self.memory.staged()} == self.staged


StoreModel.TestCase.settings = settings(
    max_examples=10, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreModel = StoreModel.TestCase


class LongStoreModel(StoreModel):
    """The same, for longer."""


LongStoreModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLongStoreModel = pytest.mark.slow(pytest.mark.stress(LongStoreModel.TestCase))
