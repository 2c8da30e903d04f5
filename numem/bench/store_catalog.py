"""The catalog: lookups of 200 nodes among 100,000, and appends early and late in a memory's life."""

import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from numem.bench.nodes import SCOPE, piece_node
from numem.bench.pairs import figure, interleaved, median_ms
from numem.job.reports import nearest_rank
from numem.state.manifest import chunk_of
from numem.state.node import Node
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Placement
from numem.store.memory import Memory

ROWS = 100_000
FOUND = 200
PAIRS = 21
EARLY, LATE = 50, 2_000
BLOCKS, APPENDS = 15, 20


def lookups(pairs: int = PAIRS, rows: int = ROWS, found: int = FOUND) -> dict[str, Any]:
    """`lookup_200_hot_ms` and `lookup_200_fresh_ms`: `Memory.lookup` of 200 consecutive nodes of a chain of 100,000.

    Nodes are like those of 256-token chunks (256 packed tokens, 16 page ids, one piece), published 2,000 at a time and
    then maintained, so that the table is one fragment.

    Hot: on a handle that has answered the same lookup before. Fresh: opening the memory and the first lookup, in one
    figure (`open_ms` and `lookup_ms` are its parts), on the files' pages in the page cache; the handle has loaded nothing.
    `peer_ms`: the same rows by Lance alone, with its BTREE, on an open dataset and on one opened anew.
    """
    import lance

    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        home = Path(place) / "memory"
        nodes = _chain(rows)
        with Memory(home) as memory:
            catalog = memory._parts.catalog
            for at in range(0, rows, max(1, rows // 50)):
                some = nodes[at : at + max(1, rows // 50)]
                places = [_place(catalog.clock.next(), node.pieces[0]) for node in some]
                catalog.append(Facts(placements=places, nodes=some))
            memory.care.maintain(least=2, keep_versions_s=0)
        wanted = [node.id for node in nodes[rows // 2 : rows // 2 + found]]
        expected = tuple(nodes[rows // 2 : rows // 2 + found])
        del nodes, some, places  # a hundred thousand objects would cost every pass of the garbage collector
        opened: list[float] = []
        url = str(home / "catalog" / "nodes.lance")
        literals = ",".join(f"X'{id.hex()}'" for id in wanted)
        where = f"id IN ({literals})"
        table = lance.dataset(url)
        with Memory(home) as memory:
            for _ in range(2):
                assert memory.lookup(wanted) == expected

            def hot() -> None:
                memory.lookup(wanted)

            def fresh() -> None:
                started = time.perf_counter()
                handle = handles[0] = Memory(home)
                opened.append(time.perf_counter() - started)
                handle.lookup(wanted)

            def close() -> None:
                if handles[0] is not None:
                    handles[0].close()
                    handles[0] = None

            handles: list[Memory | None] = [None]
            calls = {
                "hot": hot,
                "fresh": fresh,
                "peer hot": lambda: table.to_table(filter=where),
                "peer fresh": lambda: lance.dataset(url).to_table(filter=where),
            }
            seconds = interleaved(calls, pairs, close)
            close()
            with Memory(home) as other:
                assert other.lookup(wanted) == expected
            started = time.perf_counter()
            with Memory(home) as other:
                other._parts.catalog.load()
                loaded = time.perf_counter() - started
    ms = {name: [value * 1e3 for value in values] for name, values in seconds.items()}
    open_ms = median_ms(opened[1:])
    return {
        "lookup_200_hot_ms": figure(ms["hot"], most=3, peer_ms=median_ms(seconds["peer hot"]), rows=rows),
        "lookup_200_fresh_ms": figure(
            ms["fresh"],
            most=15,
            peer_ms=median_ms(seconds["peer fresh"]),
            open_ms=open_ms,
            lookup_ms=median_ms([whole - part for whole, part in zip(seconds["fresh"], opened[1:], strict=True)]),
            load_all_ms=round(loaded * 1e3, 1),
            rows=rows,
        ),
    }


def appending(blocks: int = BLOCKS, appends: int = APPENDS, early: int = EARLY, late: int = LATE) -> dict[str, Any]:
    """`append_p95_2000_vs_50`: p95 of publications of one 256-byte piece after 2,000 commits, over the p95 after 50.

    Each publication is one commit of everything: volume, placements, nodes, ledger, until its ticket says published.
    Maintenance runs as it does by itself, in the background of both memories. Blocks of appends take turns; each block
    begins with a copy of the memory of 50 commits, and the other one grows on. The ratio is one of p95s, per block.
    """
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        root = Path(place)
        with Memory(root / "young") as memory:
            _publish(memory, 0, early)
        old = Memory(root / "old")
        p95: dict[str, list[float]] = {"young": [], "old": []}
        with old:
            _publish(old, 0, late)
            for block in range(blocks):
                shutil.copytree(root / "young", root / "copy")
                with Memory(root / "copy") as young:
                    young.nodes()
                    _publish(young, 10**6, 2)
                    samples: dict[str, list[float]] = {"young": [], "old": []}
                    for number in range(appends):
                        samples["young"] += _publish(young, 2 * 10**6 + number, 1)
                        samples["old"] += _publish(old, late + block * appends + number, 1)
                for name, values in samples.items():
                    p95[name].append(nearest_rank(values, 0.95) or 0.0)
                shutil.rmtree(root / "copy")
    return {
        "append_p95_2000_vs_50": figure(
            [b / a for a, b in zip(p95["young"], p95["old"], strict=True)],
            most=2,
            p95_ms=median_ms(p95["old"]),
            p95_early_ms=median_ms(p95["young"]),
            appends=appends,
            commits=late + blocks * appends,
        )
    }


def _publish(memory: Memory, first: int, count: int) -> list[float]:
    """Seconds of publications, one after another."""
    seconds = []
    for number in range(first, first + count):
        piece = np.random.default_rng(number).integers(0, 256, 256, np.uint8)
        node = piece_node([piece])
        started = time.perf_counter()
        assert memory.publish(node, [piece]).published.result().stored
        seconds.append(time.perf_counter() - started)
    return seconds


def _chain(count: int) -> list[Node]:
    rng = np.random.default_rng(5)
    parent, nodes = SCOPE, []
    for number in range(count):
        drawn = rng.bytes(32 + 32 + 2048 + 15 * 32)
        id, piece, applied, pages = drawn[:32], drawn[32:64], drawn[64:2112], drawn[2112:]
        chunk = chunk_of([0, 256 * number, 0], [60, 256, 192], "bfloat16", piece).model_dump(mode="json")
        node = Node(
            id=id,
            parent=parent,
            scope=SCOPE,
            kind="kv",
            start=256 * number,
            count=256,
            applied=applied,
            pieces=(piece,),
            fields=(
                {
                    "id": "kv",
                    "value": {"dtype": "bfloat16", "shape": [60, 256 * (number + 1), 192]},
                    "chunk_shape": [60, 256, 192],
                    "coordinate_space": {},
                    "attributes": {},
                    "chunks": [chunk],
                },
            ),
            coordinate={"processed_count": 256 * (number + 1)},
            marks=(*(pages[at : at + 32] for at in range(0, len(pages), 32)), id),
            append_axis=1,
            provenance={"numem": "bench"},
        )
        nodes.append(node)
        parent = id
    return nodes


def _place(sequence: int, content: bytes) -> Placement:
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Placement(sequence, content, "object", "", "bench.w000.000001", "f.lance", 1, 0, 10, 0, 0, digest)
