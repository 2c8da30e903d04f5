"""Linear layers on a device: which product serves a number of rows. Every choice gives the same bits.

rows <= 32                  short rows of weights: `segments.few_rows`; long ones: `chain.few_rows`
more, K < 4096              `segments.many_rows`
more, K >= 4096             the library's product at fixed numbers of rows, where it was proved equal on this device
                            for this shape; `many_rows` for the rest
"""

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import chain, segments
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.unpack import unpack

CLASSES = (8192, 4096, 2048, 1024, 512)
"""Rows that the library's product is called with."""

_proved: dict[tuple[object, ...], bool] = {}
_scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
_outgrown: list[Tensor] = []
"""Scratches that were too small for a later matrix: graphs of more than `segments.FEW` rows hold their addresses."""


def linear(h: Tensor, matrix: Matrix, out: Tensor, *, act: str | None = None, pdl: bool = False) -> None:
    """out DT [M, N] = matrix of h DT [M, K], contiguous both.

    Args:
        act: the matrix is [gate | up], and out [M, N / 2] the gated half; where `gates` says so.
    """
    rows = len(h)
    if act is not None and not gates(matrix, rows):
        raise InputError(
            f"linear: an activation in a product of {rows} rows of {matrix.in_features} columns; launch `gate.gate` after it"
        )
    if rows <= segments.FEW:
        if segments.serves(matrix):
            segments.few_rows(matrix, out, h=h, act=act, pdl=pdl)
        else:
            chain.few_rows(matrix, h, out, act=act, pdl=pdl)
        return
    weight = matrix.weights if matrix.bits == 16 else unpack(matrix, _room(matrix))
    at = 0
    if not segments.serves(matrix) and matrix.bias is None:
        for size in CLASSES:
            while rows - at >= size and proved(weight, size):
                torch.mm(h[at : at + size], weight.T, out=out[at : at + size])
                at += size
    if at < rows:
        segments.many_rows(weight, matrix.bias, h[at:], out[at:])


def gates(matrix: Matrix, rows: int) -> bool:
    """Whether `linear` of so many rows takes an activation."""
    return rows <= segments.FEW and (segments.gates(matrix) or not segments.serves(matrix))


def proved(weight: Tensor, rows: int) -> bool:
    """Whether the library's product of `rows` rows with a weight of this shape has the bits of `many_rows` here.

    Compared once per process, device, shape and number of rows, on random rows and on weights of the same shape.
    """
    if weight.device.type != "cuda" or weight.dtype is torch.float32:
        return False
    key = (weight.device, weight.dtype, tuple(weight.shape), rows)
    found = _proved.get(key)
    if found is None:
        generator = torch.Generator(device=weight.device).manual_seed(rows)
        h = torch.randn((rows, weight.shape[1]), generator=generator, device=weight.device).to(weight.dtype)
        mine = torch.empty((rows, len(weight)), dtype=weight.dtype, device=weight.device)
        segments.many_rows(weight, None, h, mine)
        found = _proved[key] = bool(torch.equal(mine.view(torch.int16), torch.mm(h, weight.T).view(torch.int16)))
    return found


def _room(matrix: Matrix) -> Tensor:
    """Where a packed matrix is unpacked: one place per device, as large as the largest so far."""
    weights = matrix.weights
    key = (weights.device, matrix.dtype)
    size = matrix.out_features * matrix.in_features
    if key not in _scratch or _scratch[key].numel() < size:
        if key in _scratch:
            _outgrown.append(_scratch[key])
        _scratch[key] = torch.empty(size, dtype=matrix.dtype, device=weights.device)
    return _scratch[key][:size].view(matrix.out_features, matrix.in_features)
