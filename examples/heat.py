"""A heat equation with durable checkpoints: run, fork with another coefficient, restore in a new process.

    u_t = alpha(y, x) (u_yy + u_xx),  u = 0 on the boundary;  explicit Euler, 5-point stencil, float64

A checkpoint is a node: its causal id says which steps under which coefficient were applied to which state; its pieces
are the tiles of the field. A tile that did not change is the same piece, so a fork stores only what it touches.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from numem import Memory
from numem.identity.canonical import canonical_json
from numem.identity.digest import content_id, framed_sha256
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.lineage.log import shared, tree
from numem.state.field import buffers, cut, join
from numem.state.node import Node

Change = tuple[int, int, int, int, float]  # in rows [0] to [1] and columns [2] to [3], alpha is [4]
CELLS, TILE, EVERY, DX, DT, ALPHA = 128, 16, 8, 1.0, 0.2, 1.0
PLAIN, SLOW = (0, 0, 0, 0, ALPHA), (96, 112, 16, 32, 0.25)


def steps(u: np.ndarray, count: int, change: Change) -> np.ndarray:
    """`count` steps of a field [CELLS, CELLS]; stable for alpha dt / dx^2 <= 1/4."""
    alpha = np.full_like(u, ALPHA)
    alpha[change[0] : change[1], change[2] : change[3]] = change[4]
    for _ in range(count):
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
        u = np.pad(u[1:-1, 1:-1] + alpha[1:-1, 1:-1] * (DT / DX**2) * around, 1)
    return u


START = np.zeros((CELLS, CELLS))
START[90:120, 8:60], START[20:40, 80:90] = np.arange(52) / 64 + 1, 3.0
IDENTITY = Identity(
    {"equation": "u_t = alpha (u_yy + u_xx)", "scheme": "explicit-euler-5-point", "scheme_version": 1, "alpha": ALPHA,
     "dt": DT, "mesh": {"cells": [CELLS, CELLS], "dx": DX}, "boundary": "dirichlet 0", "precision": "float64"},
    NumericPolicy("numpy-float64-v1", content_id(steps(START, 3, SLOW))), device_class="cpu",
)  # fmt: skip


def run(memory: Memory, name: str, count: int, parent: Node | None, u: np.ndarray, change: Change) -> list[Node]:
    """`count` durable checkpoints, EVERY steps apart, on a branch of their own."""
    nodes: list[Node] = []
    for _ in range(count):
        u = steps(u, EVERY, change)
        origin, start = (parent.id, parent.end) if parent else (IDENTITY.scope, 0)
        applied = canonical_json({"steps": EVERY, "change": change, "from": None if parent else content_id(START)})
        tiles = cut("temperature", u, (TILE, TILE), coordinate_space={"axes": "y,x", "unit": "K"})
        parent = Node(
            id=framed_sha256("numem/field/step/v1", origin, applied), parent=origin, scope=IDENTITY.scope,
            kind="field", start=start, count=EVERY, applied=applied, pieces=tiles.pieces, fields=(tiles.field,),
            coordinate={"step": start + EVERY}, provenance={"numpy": np.__version__},
        )  # fmt: skip
        memory.publish(parent, tiles.payloads).published.result()
        nodes.append(parent)
    if name not in [branch.name for branch in memory.branches()]:
        memory.create_branch(name, nodes[-1].id, actor="heat.py", reason=f"alpha {change}")
    return nodes


def restore(memory: Memory, state: bytes) -> np.ndarray:
    """The field of a checkpoint, every tile verified on the way in."""
    (field,) = memory.manifest(state).fields
    memory.read(filled := buffers(field))
    return join(field, filled)


def main(home: Path, resume: str | None) -> None:
    with Memory(home) as memory:
        if resume:
            return print(content_id(steps(restore(memory, bytes.fromhex(resume)), EVERY, SLOW)).hex())
        memory.register(IDENTITY)
        base = run(memory, "main", 5, None, START, PLAIN)
        fork = run(memory, "slow-corner", 2, base[2], restore(memory, base[2].id), SLOW)
        print(tree(memory, memory.nodes("field")))
        for other, what in ((base[2], "the state it was forked from"), (base[4], "main at the same step")):
            both = shared(memory, other.id, fork[1].id)
            print(f"the fork at step {fork[1].end} shares {both.chunks} of {both.of} tiles with {what}")
        expected = content_id(restore(memory, fork[1].id)).hex()
    command = [sys.executable, __file__, "--memory", str(home), "--resume", fork[0].id.hex()]
    found = subprocess.check_output(command, text=True).strip()
    print(f"resumed from step {fork[0].end} in a new process: bit-exact {found == expected}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=Path, help="keep the checkpoints in this directory")
    parser.add_argument("--resume", help="only go one checkpoint on from this state and print the field's digest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(options.memory or Path(temporary), options.resume)
