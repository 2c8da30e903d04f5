"""Publication against hashing, writing and syncing one file of the same bytes; bytes on disk against bytes published."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from numem.bench.nodes import piece_node
from numem.bench.pairs import figure, interleaved, median_ms, ratios
from numem.identity.digest import content_id
from numem.state.node import Node
from numem.store.memory import Memory

COUNT = 16
NBYTES = 4 << 20
PAIRS = 21
CHUNK_TOKENS = 256
# Keys and values of SmolLM2-135M in bfloat16: 2 x 30 layers x 192 values x 2 bytes.
ROW_BYTES = 60 * 192 * 2


def publishing(pairs: int = PAIRS, count: int = COUNT, nbytes: int = NBYTES) -> dict[str, Any]:
    """`publish_vs_hash_write_fsync`: speed of a publication as a ratio to the plain way to make the bytes durable.

    Mine: `Memory.publish` of one node per piece and `flush`: capture, content ids checked, volume, catalog and ledger,
    all synced. Peer: for each piece its content id, then `write`; one `fsync`; one thread. Other bytes every time.
    """
    rng = np.random.default_rng(7)
    pieces: list[np.ndarray] = []
    nodes: list[Node] = []
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place, Memory(Path(place) / "memory") as memory:
        path = Path(place) / "pack"

        def fresh() -> None:
            path.unlink(missing_ok=True)
            pieces[:] = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(count)]
            nodes[:] = [piece_node([piece]) for piece in pieces]

        def peer() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                for piece in pieces:
                    content_id(piece)
                    assert os.write(descriptor, piece.data) == nbytes
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        def mine() -> None:
            tickets = [memory.publish(node, [piece]) for node, piece in zip(nodes, pieces, strict=True)]
            memory.flush()
            assert all(ticket.published.result().stored for ticket in tickets)

        seconds = interleaved({"peer": peer, "mine": mine}, pairs, fresh)
    return {
        "publish_vs_hash_write_fsync": figure(
            ratios(seconds["peer"], seconds["mine"]),
            least=0.7,
            ms=median_ms(seconds["mine"]),
            peer_ms=median_ms(seconds["peer"]),
            bytes=count * nbytes,
        )
    }


def overhead(chunks: int = COUNT, small: int = 1_000, chunk_bytes: int = CHUNK_TOKENS * ROW_BYTES) -> dict[str, Any]:
    """`disk_overhead`: bytes of files below the home tier over bytes of pieces, for chunks and for small pieces.

    The tier's files are all that a volume needs: sidecars with padding, data files, manifests, and the facts from which
    a lost catalog is rebuilt. `with_catalog` adds the catalog and the ledger. Chunks: one node each, published
    together. Small pieces: one node of 256-byte pieces.
    """
    rng = np.random.default_rng(11)
    large = _disk([[rng.integers(0, 256, chunk_bytes, np.uint8)] for _ in range(chunks)])
    tiny = _disk([[rng.integers(0, 256, 256, np.uint8) for _ in range(small)]])
    return {
        "disk_overhead": {
            "chunks": {**large, "bar": "<= 1.05", "verdict": _verdict(large["ratio"], 1.05)},
            "small_pieces": {**tiny, "bar": "<= 1.5", "verdict": _verdict(tiny["ratio"], 1.5)},
        }
    }


def _disk(groups: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        home = Path(place)
        with Memory(home) as memory:
            published = [piece_node(pieces, name=f"{number}".encode()) for number, pieces in enumerate(groups)]
            for node, pieces in zip(published, groups, strict=True):
                memory.stage(node, pieces)
            memory.publish_staged([node.id for node in published])
        logical = sum(piece.nbytes for pieces in groups for piece in pieces)
        sizes = {name: _nbytes(home / name) for name in ("object", "catalog", "ledger")}
    return {
        "ratio": round(sizes["object"] / logical, 4),
        "with_catalog": round(sum(sizes.values()) / logical, 4),
        "logical_bytes": logical,
        "tier_bytes": sizes["object"],
        "catalog_bytes": sizes["catalog"] + sizes["ledger"],
    }


def _nbytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def _verdict(ratio: float, most: float) -> str:
    return "met" if ratio <= most else "missed"
