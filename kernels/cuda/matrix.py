"""A weight matrix on a device: dense, or packed codes that kernels turn into dense weights in registers.

Packed: int32 words, rows padded to blocks of 128 columns, in the order in which the tensor core takes weights from
registers: thread t of the four of a row multiplies columns 16 s + 8 h + 2 t + e, e and h in {0, 1}, so these lie together,
16 bytes of a thread, and unpacking needs no exchange between threads. `packed_bytes` has the order. What four threads of each
of 16 rows load at once is 1 KiB in one piece, and so are the scales of these rows (`tiled`). A weight is
DT((code - zero) * scale (+ min)) by block of 32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numem.errors import InputError

BLOCK = 128
STEP = 32
TILE = 16  # rows
WORDS = 16  # of a row that four threads load at once


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [N, K] and an optional bias.

    Attributes:
        weights: of `dtype` [N, K]; or packed, int32 [ceil(N / 16), ceil(K / 128) * bits / 4, 16, 16].
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
        # without mins, `unpack` multiplies scales by 2^15 + zero or 2^16 + zero: that product must be exact
        if mins is None and not torch.equal(scales.half().float(), scales.float()):
            raise InputError(
                "matrix: scales of more than 11 bits without mins; keep them in float16, or the weights dense"
            )
        if mins is None and max(_odd((1 << base) + zero) for base in (15, 16)) * 2047 >= 1 << 24:
            raise InputError(f"matrix: a zero of {zero} without mins; give mins, or keep the weights dense")
        blocks = -(-k // BLOCK)
        padded = torch.full((n, blocks * BLOCK), zero, dtype=torch.uint8, device=codes.device)
        padded[:, :k] = codes
        words = tiled(packed_bytes(padded, bits).view(torch.int32), WORDS)

        def spread(small: Tensor | None) -> Tensor | None:
            if small is None:
                return None
            out = torch.zeros((n, blocks * (BLOCK // STEP)), device=small.device)
            out[:, : k // STEP] = small.float() * units[:, None]
            half = out.half()
            return tiled(half if torch.equal(half.float(), out) else out, BLOCK // STEP).to(device)

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
        codes = codes_of(rows_of(self.weights, n).view(torch.uint8), self.bits).view(n, -1, STEP)
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
    if bits == 8:
        return codes.view(n, -1, 2, 4, 2, 4, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(n, -1)
    both = codes.view(n, -1, 2, 2, 2, 2, 4, 2).permute(0, 1, 6, 2, 3, 5, 7, 4)
    return (both[..., 0] | both[..., 1] << 4).reshape(n, -1)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] of bytes of `packed_bytes`."""
    n = len(packed)
    if bits == 8:
        return packed.view(n, -1, 2, 4, 4, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(n, -1)
    both = torch.stack((packed & 15, packed >> 4), -1).view(n, -1, 4, 2, 2, 2, 2, 2)
    return both.permute(0, 1, 3, 4, 7, 5, 2, 6).reshape(n, -1)


def _odd(n: int) -> int:
    """n without its factors of two."""
    return n // (n & -n)


def tiled(rows: Tensor, width: int) -> Tensor:
    """Rows [N, groups * width] as [ceil(N / 16), groups, 16, width]; zeros where there are none."""
    n, across = rows.shape
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -n % TILE))
    return padded.view(-1, TILE, across // width, width).transpose(1, 2).contiguous()


def rows_of(tiles: Tensor, n: int) -> Tensor:
    """Rows [n, groups * width] of what `tiled` gave."""
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1] * tiles.shape[3])[:n]


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
            if parts[0] is None:
                return None
            given = [p for p in parts if p is not None]
            if given[0].ndim == 2:  # dense
                return torch.cat(given)
            return tiled(torch.cat([rows_of(p, n) for p in given]), given[0].shape[3])

        weights = joined([each.weights for each in matrices])
        assert weights is not None
        scales, mins = joined([each.scales for each in matrices]), joined([each.mins for each in matrices])
        rows = len(matrices) * n
        return cls(Matrix(rows, k, weights, first.bits, first.dtype, None, scales, mins, first.zero), len(matrices))
