"""Batch restores of 16 x 4 MiB from a local tier against one plain `preadv` of a pack file of the same bytes."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from numem.identity.digest import content_id
from numem.state.manifest import chunk_of
from numem.state.node import Node
from numem.store.memory import Memory
from numem.store.payload.sidecar import sidecar_name

COUNT = 16
NBYTES = 4 << 20
PAIRS = 21


def restoring(pairs: int = PAIRS) -> dict[str, Any]:
    """`restore_vs_pread_warm` and `restore_vs_pread_cold`: speed of `Memory.read`, verified, as a ratio to `preadv`.

    Pairs take turns in one process. Cold: `POSIX_FADV_DONTNEED` on both files before each, which empties the guest's
    page cache alone.
    """
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        root = Path(place)
        pieces = [np.random.default_rng(n).integers(0, 256, NBYTES, np.uint8) for n in range(COUNT)]
        pack = root / "pack"
        with open(pack, "wb") as file:
            file.writelines(piece.data for piece in pieces)
            file.flush()
            os.fsync(file.fileno())
        node = _node(pieces)
        with Memory(root / "memory") as memory:
            memory.stage(node, pieces)
            memory.publish_staged([node.id])
            sidecars = sorted((root / "memory").rglob("*.blob"))
            return {
                "restore_vs_pread_warm": _against(memory, node, pieces, pack, sidecars, pairs, cold=False),
                "restore_vs_pread_cold": _against(memory, node, pieces, pack, sidecars, pairs, cold=True),
            }


def restoring_from_s3(pairs: int = PAIRS) -> dict[str, Any]:
    """`s3_restore_vs_obstore`: `Memory.read`, verified, in the caller's buffers, against `obstore.get_ranges` of the same
    ranges of the same object, from SeaweedFS on loopback."""
    import obstore
    from obstore.store import S3Store

    from numem.bench.s3server import serve

    with tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        root = Path(place)
        pieces = [np.random.default_rng(n).integers(0, 256, NBYTES, np.uint8) for n in range(COUNT)]
        node = _node(pieces)
        with (
            serve(root / "s3") as server,
            Memory(server.url("bench"), local=root / "local", storage_options=server.options) as memory,
        ):
            memory.stage(node, pieces)
            memory.publish_staged([node.id])
            copies = [memory.placements(content)[0] for content in node.pieces]
            path = f"object/{copies[0].volume}.lance/{sidecar_name(copies[0].file, copies[0].blob)}"
            store = S3Store(
                server.bucket,
                prefix="bench",
                endpoint=server.endpoint,
                access_key_id=server.access_key,
                secret_access_key=server.secret_key,
                region="us-east-1",
                virtual_hosted_style_request=False,
                client_options={"allow_http": True},
            )
            starts, lengths = [copy.offset for copy in copies], [copy.nbytes for copy in copies]
            buffers = [np.zeros(NBYTES, np.uint8) for _ in pieces]
            requests = list(zip(node.pieces, buffers, strict=True))

            def peer() -> None:
                got = obstore.get_ranges(store, path, starts=starts, lengths=lengths)
                assert sum(len(part) for part in got) == COUNT * NBYTES

            result = _paired(peer, lambda: memory.read(requests), pairs, lambda: None)
            assert all(np.array_equal(piece, buffer) for piece, buffer in zip(pieces, buffers, strict=True))
            return {"s3_restore_vs_obstore": result}


def quartiles(ratios: list[float]) -> dict[str, float]:
    """Median and quartiles of ratios, and how many there were."""
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return {
        "median": round(float(median), 3),
        "q1": round(float(low), 3),
        "q3": round(float(high), 3),
        "pairs": len(ratios),
    }


def _against(
    memory: Memory,
    node: Node,
    pieces: list[np.ndarray],
    pack: Path,
    sidecars: list[Path],
    pairs: int,
    *,
    cold: bool,
) -> dict[str, Any]:
    buffers = [np.zeros(NBYTES, np.uint8) for _ in pieces]
    requests = list(zip(node.pieces, buffers, strict=True))
    views = [buffer.data for buffer in buffers]
    for path in (pack, *sidecars):
        _drop(path)  # so that both come into the page cache in the same way
    with open(pack, "rb", buffering=0) as file:

        def peer() -> None:
            got = os.preadv(file.fileno(), views, 0)
            assert got == COUNT * NBYTES

        def prepare() -> None:
            for path in (pack, *sidecars) if cold else ():
                _drop(path)

        result = _paired(peer, lambda: memory.read(requests), pairs, prepare)
    assert all(np.array_equal(piece, buffer) for piece, buffer in zip(pieces, buffers, strict=True))
    return result


def _paired(
    peer: Callable[[], object], mine: Callable[[], object], pairs: int, prepare: Callable[[], None]
) -> dict[str, Any]:
    """Speed of `mine` as a ratio to that of `peer`. The first pair warms up; who goes first alternates."""
    theirs: list[float] = []
    ours: list[float] = []
    for number in range(pairs + 1):
        order = [(peer, theirs), (mine, ours)]
        for call, times in order if number % 2 else order[::-1]:
            prepare()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(theirs[1:], ours[1:], strict=True)]
    return {**quartiles(ratios), "ms": round(float(np.median(ours[1:])) * 1e3, 2), "bytes": COUNT * NBYTES}


def _drop(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _node(pieces: list[np.ndarray]) -> Node:
    scope = content_id(b"numem/bench/store-read")
    contents = [content_id(piece) for piece in pieces]
    fields = tuple(
        {
            "id": f"f{number}",
            "value": {"dtype": "uint8", "shape": [1, 1, NBYTES]},
            "chunk_shape": [1, 1, NBYTES],
            "coordinate_space": {},
            "attributes": {},
            "chunks": [chunk_of([0, 0, 0], [1, 1, NBYTES], "uint8", content).model_dump(mode="json")],
        }
        for number, content in enumerate(contents)
    )
    identity = content_id(b"".join(contents))
    return Node(
        id=identity,
        parent=scope,
        scope=scope,
        kind="rows",
        start=0,
        count=1,
        applied=b"-",
        pieces=tuple(contents),
        fields=fields,
        coordinate={"row": 1},
        marks=(identity,),
        append_axis=1,
        provenance={"bench": "store-read"},
    )
