"""Nodes, payloads and child processes for the tests of the durable plane."""

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from numem.identity.digest import content_id
from numem.state.manifest import chunk_of
from numem.state.node import Node
from numem.store import barrier
from numem.store.memory import Memory

Chain = list[tuple[Node, list[bytes]]]

SCOPE = hashlib.sha256(b"numem/tests/store").digest()
WIDTH = 64
COUNT = 16


def payload(nbytes: int, seed: int) -> bytes:
    """Incompressible bytes, equal for equal arguments."""
    return np.random.default_rng([nbytes, seed]).bytes(nbytes)


def make_node(
    payloads: Sequence[bytes], *, parent: bytes = SCOPE, start: int = 0, name: str = "", kind: str = "rows"
) -> Node:
    """A node of one field per payload; each payload is `uint8[1, COUNT, nbytes / COUNT]`, joined along axis 1."""
    identity = hashlib.sha256(b"|".join((parent, str(start).encode(), name.encode()))).digest()
    fields = []
    for number, data in enumerate(payloads):
        width = len(data) // COUNT
        whole = width * COUNT == len(data)
        shape = [1, COUNT, width] if whole else [1, 1, len(data)]
        chunk = chunk_of([0, start if whole else 0, 0], shape, "uint8", content_id(data))
        fields.append(
            {
                "id": f"f{number}",
                "value": {"dtype": "uint8", "shape": [1, start + COUNT if whole else 1, shape[2]]},
                "chunk_shape": shape,
                "coordinate_space": {},
                "attributes": {},
                "chunks": [chunk.model_dump(mode="json")],
            }
        )
    return Node(
        id=identity,
        parent=parent,
        scope=SCOPE,
        kind=kind,
        start=start,
        count=COUNT,
        applied=name.encode() or b"-",
        pieces=tuple(content_id(data) for data in payloads),
        fields=tuple(fields),
        coordinate={"row": start + COUNT},
        marks=(identity,),
        append_axis=1,
        provenance={"test": "store"},
    )


def make_chain(count: int, nbytes: int = 70_000, seed: int = 0, name: str = "") -> list[tuple[Node, list[bytes]]]:
    """Nodes of one payload each, every one the child of the one before."""
    chain: list[tuple[Node, list[bytes]]] = []
    parent = SCOPE
    for number in range(count):
        data = [payload(nbytes, seed * 1000 + number)]
        node = make_node(data, parent=parent, start=number * COUNT, name=name)
        chain.append((node, data))
        parent = node.id
    return chain


def put(memory: Memory, chain: Sequence[tuple[Node, Sequence[bytes]]]) -> Any:
    """Stage and publish nodes; returns the report."""
    for node, data in chain:
        memory.stage(node, data)
    return memory.publish_staged([node.id for node, _ in chain])


def read_back(memory: Memory, node: Node, sizes: Sequence[int], tier: str | None = None) -> list[bytes]:
    """The payloads of a node."""
    buffers = [bytearray(size) for size in sizes]
    memory.read(list(zip(node.pieces, buffers, strict=True)), tier=tier)
    return [bytes(buffer) for buffer in buffers]


def assert_readable(memory: Memory, chain: Sequence[tuple[Node, Sequence[bytes]]], tier: str | None = None) -> None:
    """Every node is there, equal, and its payloads are equal as bytes."""
    for node, data in chain:
        assert memory.get(node.id) == node
        assert read_back(memory, node, [len(d) for d in data], tier) == list(data)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below a directory with its size and modification time."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def sidecars(root: Path) -> list[Path]:
    """Packed payload files below a directory, oldest volume first."""
    return sorted(root.rglob("*.blob"), key=lambda path: path.stat().st_mtime_ns)


def die_at(step: str, nth: int = 1) -> None:
    """Kill this process, with SIGKILL, when a step is reached for the nth time."""
    left = [nth]

    def observer(reached: str, what: str) -> None:
        if reached == step or f"{reached} {what}".startswith(step):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    barrier.observe(observer)


def run_children(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], timeout: float = 60) -> list[int]:
    """Run spawned processes at once; returns their exit codes (negative: the signal that ended them)."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=target, args=args) for args in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
            raise AssertionError(f"child {child.name} did not end within {timeout} s")
    return [child.exitcode if child.exitcode is not None else -1 for child in children]
