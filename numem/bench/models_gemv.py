"""Matrix-vector products of the quantised formats against the bandwidth at which the same memory can be read."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from numem.bench.pairs import figure, interleaved
from numem.kernels.native import read_bytes
from numem.kernels.quantised import QuantisedLinear

# SmolLM2's and Gemma's feed-forward shape, roughly: a matrix small enough for the caches, many of them, each used once
# a round, so that every product comes from memory.
ROWS, COLUMNS = 4096, 1024
ROUNDS = 15
FORMATS = ("q8", "q4", "q4a")


def gemv_vs_bandwidth(nbytes: int) -> dict[str, Any]:
    """Bytes of a format's matrices that one-row products take per second, as a ratio to reading these bytes with as many
    threads: the least of FORMATS, with all of them under "formats". The two sides take turns.

    Args:
        nbytes: bytes of the matrices; far more than the caches hold.
    """
    import torch

    formats = {}
    x, out = torch.randn(1, COLUMNS), torch.empty(1, ROWS)
    weight = torch.randn(ROWS, COLUMNS)
    for name in FORMATS:
        planes = QuantisedLinear.of_parts([weight], name).planes()
        count = max(1, nbytes // sum(plane.nbytes for plane in planes.values()))
        copies = [
            QuantisedLinear.of_planes(name, ROWS, COLUMNS, {key: plane.clone() for key, plane in planes.items()})
            for _ in range(count)
        ]
        buffers = [plane for layer in copies for plane in layer.planes().values()]
        size = sum(plane.nbytes for plane in buffers)
        seconds = interleaved({"read": partial(_read, buffers), "product": partial(_multiply, copies, x, out)}, ROUNDS)
        values = [read / product for read, product in zip(seconds["read"], seconds["product"], strict=True)]
        formats[name] = figure(values, least=0.85, gb_per_s=round(size / min(seconds["product"]) / 1e9, 1))
        formats[name]["gb_per_s_read"] = round(size / min(seconds["read"]) / 1e9, 1)
    worst = min(formats, key=lambda name: float(formats[name]["median"]))
    return {**formats[worst], "format": worst, "formats": formats}


def _read(buffers: Sequence[Tensor]) -> None:
    for buffer in buffers:
        read_bytes(buffer)


def _multiply(layers: Sequence[QuantisedLinear], x: Tensor, out: Tensor) -> None:
    for layer in layers:
        layer(x, out)
