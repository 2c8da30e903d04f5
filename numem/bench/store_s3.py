"""Batch restores from an object store against obstore's own ranged reads of the same object."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from numem.bench.nodes import piece_node
from numem.bench.pairs import figure, interleaved, median_ms, ratios
from numem.bench.s3server import S3Server, serve
from numem.errors import StoreError
from numem.store.memory import Memory
from numem.store.payload.sidecar import sidecar_name

COUNT = 16
NBYTES = 4 << 20
PAIRS = 15


def s3_restoring(pairs: int = PAIRS, count: int = COUNT, nbytes: int = NBYTES) -> dict[str, Any]:
    """`s3_restore_vs_obstore`: speed of `Memory.read` from SeaweedFS on loopback, verified, into the caller's buffers,
    as a ratio to `obstore.get_ranges` of the same ranges of the same object, which gives buffers of its own.

    Where `weed` is not installed, the figure says so instead.
    """
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        root = Path(place)
        try:
            with serve(root / "s3") as server:
                return {"s3_restore_vs_obstore": _measure(server, root, pairs, count, nbytes)}
        except StoreError as error:
            if "not installed" not in str(error):
                raise
            return {"s3_restore_vs_obstore": {"skipped": str(error)}}


def _measure(server: S3Server, root: Path, pairs: int, count: int, nbytes: int) -> dict[str, Any]:
    import obstore
    from obstore.store import from_url

    rng = np.random.default_rng(9)
    pieces = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(count)]
    node = piece_node(pieces)
    buffers = [np.zeros(nbytes, np.uint8) for _ in pieces]
    requests = [(content, buffer.data) for content, buffer in zip(node.pieces, buffers, strict=True)]
    config: Any = {name: value for name, value in server.options.items() if name != "allow_http"}
    with Memory(server.url("memory"), storage_options=server.options, local=root / "local") as memory:
        memory.stage(node, pieces)
        memory.publish_staged([node.id])
        places = [memory.placements(content)[0] for content in node.pieces]
        first = places[0]
        assert len({(place.file, place.blob) for place in places}) == 1
        store = from_url(server.url("memory/object"), config=config, client_options={"allow_http": True})
        name = f"{first.volume}.lance/{sidecar_name(first.file, first.blob)}"
        starts = [place.offset for place in places]
        ends = [place.offset + place.nbytes for place in places]
        got = obstore.get_ranges(store, name, starts=starts, ends=ends)
        assert [bytes(one) for one in got] == [piece.tobytes() for piece in pieces]
        calls = {
            "peer": lambda: obstore.get_ranges(store, name, starts=starts, ends=ends),
            "mine": lambda: memory.read(requests, tier="object"),
        }
        seconds = interleaved(calls, pairs)
    assert all(np.array_equal(piece, buffer) for piece, buffer in zip(pieces, buffers, strict=True))
    return dict(
        figure(
            ratios(seconds["peer"], seconds["mine"]),
            least=0.9,
            ms=median_ms(seconds["mine"]),
            peer_ms=median_ms(seconds["peer"]),
            bytes=count * nbytes,
        )
    )
