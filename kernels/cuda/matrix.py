"""A weight matrix on a device: dense, or packed codes that kernels turn into dense weights in registers.

Packed: rows of int32 words, padded to blocks of 128 columns, in the order in which the tensor core takes weights from
registers: thread t of the four of a row multiplies columns 16 s + 8 h + 2 t + e, e and h in {0, 1}, so these lie together,
16 bytes of a thread, and unpacking needs no exchange between threads. `packed_bytes` has the order. A weight is
DT((code - zero) * scale (+ min)) by block of 32. Scales of 16 rows lie together, block of columns by block, as tiles of
products read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numem.errors import InputError

BLOCK = 128
STEP = 32
TILE = 16  # rows


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [N, K] and an optional bias.

    Attributes:
        weights: of `dtype` [N, K]; or int32 [N, ceil(K / 128) * words], packed.
        bits: 16 where dense, else 8 or 4.
        dtype: DT, of the weights as products take them.
        bias: float32 [N], or None.
        scales, mins: [ceil(N / 16), ceil(K / 128), 16, 4], float16 where that holds all of them exactly, else float32.
    """

    out_features: int
    in_features: int
    weights: Tensor
    bits: int
    dtype: torch.dtype
    bias: Tensor | None = None
    scales: Tensor | None = None
    mins: Tensor | None = None
    zero: int = 0

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> "Matrix":
        """Of a contiguous weight [N, K], kept as it is."""
        if weight.ndim != 2 or not weight.is_contiguous():
            raise InputError(f"matrix: weight {tuple(weight.shape)} must be a contiguous matrix")
        return cls(weight.shape[0], weight.shape[1], weight, 16, weight.dtype, bias)

    @classmethod
    def packed(
        cls,
        codes: Tensor,
        scales: Tensor,
        units: Tensor,
        *,
        zero: int,
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
        mins: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> "Matrix":
        """Of codes uint8 [N, K], K a multiple of 32, on any device: they are packed where they lie.

        Args:
            scales, mins: [N, K / 32], in units of the row; scales without mins are numbers of float16.
            units: float32 [N], powers of two; scales and mins are kept multiplied by them.
        """
        n, k = codes.shape
        if k % STEP or scales.shape != (n, k // STEP) or units.shape != (n,) or bits not in (4, 8):
            raise InputError(
                f"matrix: codes {tuple(codes.shape)} of {bits} bits with scales {tuple(scales.shape)} and units "
                f"{tuple(units.shape)}: rows must be whole blocks of {STEP}, bits 4 or 8"
            )
        if mins is None and not torch.equal(scales.half().float(), scales.float()):
            # `unpack` multiplies them by an offset that 11 bits leave room for
            raise InputError(
                "matrix: scales of more than 11 bits without mins; keep them in float16, or the weights dense"
            )
        blocks = -(-k // BLOCK)
        padded = torch.full((n, blocks * BLOCK), zero, dtype=torch.uint8, device=codes.device)
        padded[:, :k] = codes
        words = packed_bytes(padded, bits).view(torch.int32)

        def spread(small: Tensor | None) -> Tensor | None:
            if small is None:
                return None
            out = torch.zeros((n, blocks * (BLOCK // STEP)), device=small.device)
            out[:, : k // STEP] = small.float() * units[:, None]
            half = out.half()
            return tiled(half if torch.equal(half.float(), out) else out).to(device)

        return cls(
            n, k, words.to(device), bits, dtype, bias,
            spread(scales), spread(mins), zero,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        held = (self.weights, self.bias, self.scales, self.mins)
        return sum(t.nbytes for t in held if t is not None)

    def reference(self) -> Tensor:
        """The weights [N, K] that products take, by torch."""
        if self.bits == 16:
            return self.weights
        assert self.scales is not None
        n = self.out_features
        codes = codes_of(self.weights.view(torch.uint8), self.bits).view(n, -1, STEP)
        values = (codes.int() - self.zero).float()
        scales = rows_of(self.scales, n)[..., None]
        # one rounding of product and sum, as the kernels' fused step
        if self.mins is not None:
            values = (values.double() * scales.double() + rows_of(self.mins, n)[..., None].double()).float()
        else:
            values = values * scales.float()
        return values.view(n, -1)[:, : self.in_features].to(self.dtype).contiguous()


def packed_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K], K a multiple of 128, as bytes [N, K * bits / 8] in the order of packed rows.

    Of a block of columns 64 c + 16 s + 8 h + 2 t + e, bytes (c, t, s, h, e) in 8 bits; in 4 bits (t, c, s // 2, h, e), of
    which the upper half is of the odd s.
    """
    n = len(codes)
    parts = codes.view(n, -1, 2, 4, 2, 4, 2)  # block, c, s, h, t, e
    if bits == 8:
        return parts.permute(0, 1, 2, 5, 3, 4, 6).reshape(n, -1)
    parts = codes.view(n, -1, 2, 2, 2, 2, 4, 2).permute(0, 1, 6, 2, 3, 5, 7, 4)  # block, t, c, s // 2, h, e, s % 2
    return (parts[..., 0] | parts[..., 1] << 4).reshape(n, -1)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] of bytes of `packed_bytes`."""
    n = len(packed)
    if bits == 8:
        return packed.view(n, -1, 2, 4, 4, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(n, -1)
    both = torch.stack((packed & 15, packed >> 4), -1).view(n, -1, 4, 2, 2, 2, 2, 2)
    return both.permute(0, 1, 3, 4, 7, 5, 2, 6).reshape(n, -1)


def tiled(scales: Tensor) -> Tensor:
    """Scales [N, 4 blocks] of rows as [ceil(N / 16), blocks, 16, 4]."""
    n = len(scales)
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -n % TILE))
    return padded.view(-1, TILE, scales.shape[1] // 4, 4).transpose(1, 2).contiguous()


def rows_of(scales: Tensor, n: int) -> Tensor:
    """Scales [n, 4 blocks] of what `tiled` gave."""
    return scales.transpose(1, 2).reshape(-1, 4 * scales.shape[1])[:n]


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices [n, k] of one form, their rows one after another in `matrix` [count * n, k].

    A kernel finds each by its number.
    """

    matrix: Matrix
    count: int

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> "Stack":
        """Of matrices without biases, copied; as the dense weights that they stand for where their forms differ."""
        first = matrices[0]
        n, k = first.out_features, first.in_features
        for each in matrices:
            if (each.out_features, each.in_features) != (n, k) or each.bias is not None:
                found = (each.out_features, each.in_features)
                raise InputError(f"stack: a matrix {found} beside {(n, k)}, or one with a bias")
        forms = {(each.bits, each.zero, each.dtype, each.mins is not None) for each in matrices}
        if len(forms) > 1:
            weight = torch.cat([each.reference() for each in matrices])
            return cls(Matrix.dense(weight), len(matrices))

        def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
            return None if parts[0] is None else torch.cat([p for p in parts if p is not None])

        def joined_tiles(parts: Sequence[Tensor | None]) -> Tensor | None:
            whole = joined([None if p is None else rows_of(p, n) for p in parts])
            return None if whole is None else tiled(whole)

        weights = joined([each.weights for each in matrices])
        assert weights is not None
        scales, mins = joined_tiles([each.scales for each in matrices]), joined_tiles([each.mins for each in matrices])
        rows = len(matrices) * n
        return cls(Matrix(rows, k, weights, first.bits, first.dtype, None, scales, mins, first.zero), len(matrices))
