"""Small tiers and what is resident in them, for the tests of eviction."""

from pathlib import Path

from numem.state.node import Node
from numem.store.config import TierSpec
from numem.store.memory import Memory
from tests.store_fixtures import make_node, payload, read_back

SIZE = 70_000


def open_small(root: Path, pieces: int | None = 4, policy: str = "slru") -> Memory:
    """A memory whose ssd holds so many pieces of SIZE bytes."""
    capacity = None if pieces is None else pieces * SIZE
    return Memory(
        root / "home",
        tiers={"object": str(root / "home" / "object"), "ssd": TierSpec(root / "ssd", capacity, policy)},
    )


def resident(memory: Memory, nodes: list[Node]) -> list[int]:
    """Positions of the nodes that are whole in ssd."""
    return [number for number, node in enumerate(nodes) if memory.available(node.id, "ssd")]


def read_ssd(memory: Memory, *nodes: Node) -> None:
    for node in nodes:
        read_back(memory, node, [SIZE], "ssd")


def singles(count: int) -> list[tuple[Node, list[bytes]]]:
    """Nodes of one piece each that do not continue one another."""
    return [(make_node([data], name=f"s{n}"), [data]) for n in range(count) for data in [payload(SIZE, 900 + n)]]
