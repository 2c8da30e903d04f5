"""Operations of a program as launches of this directory's kernels.

Walks the operations once; what has no kernel here is refused with its name. The residual stream x lies in two buffers by
turns: a launch that joins a branch to x reads the one and writes the other, as its programs all read what one of them
writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from numem.errors import UnsupportedModelError
from numem.kernels import operations as op
from numem.kernels.cuda.matrix import Matrix, Stack
from numem.kernels.cuda.rotary import HeadNorms
from numem.kernels.mixture import Mixture
from numem.kernels.program import Op, Program


@dataclass(frozen=True, slots=True)
class NormOf:
    """A norm of x: weight float32 [hidden]."""

    weight: Tensor
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Where x lies before and after a launch, and what joins it: nothing, or `y` through a norm with weight `post`."""

    before: int
    after: int
    post: Tensor | None

    @property
    def joins(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Embedding:
    """x = rows of a table, times `scale`; h = norm(x)."""

    table: Matrix
    scale: float
    norm: NormOf


@dataclass(frozen=True, slots=True)
class Normed:
    """out = matrix of norm(x), with `act` the gated half of it."""

    matrix: Matrix
    norm: NormOf
    turn: Turn
    out: str
    act: str | None


@dataclass(frozen=True, slots=True)
class Product:
    """y = matrix of a buffer."""

    matrix: Matrix
    source: str


@dataclass(frozen=True, slots=True)
class Mixed:
    """y = a mixture of experts of norm(x)."""

    router: Tensor
    gate_up: Stack
    down: Stack
    top_k: int
    norm_topk: bool
    act: str
    norm: NormOf
    turn: Turn


@dataclass(frozen=True, slots=True)
class Attention:
    """att = attention of qkv, whose keys and values are written first; `last`: only wanted rows go on from here."""

    rope: op.RopeWrite
    attend: op.Attend
    norms: HeadNorms | None
    last: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """h = norm(x), the last hidden state."""

    norm: NormOf
    turn: Turn


Launch = Embedding | Normed | Product | Mixed | Attention | Ending


class Lowering:
    """The launches of a program, `out`, and its `head`."""

    def __init__(self, program: Program) -> None:
        self.out: list[Launch] = []
        self.turn, self.pending = 0, False
        self.post: Tensor | None = None
        self.norm: NormOf | None = None
        self.head_norms: list[op.RmsNorm] = []
        self.rope: op.RopeWrite | None = None
        self.head: op.Head | None = None
        ops = [*program.body, *program.tail]
        at = 0
        while at < len(ops):
            at += self._take(ops, at, len(program.body))
        self.out.append(Ending(self._norm_of("the final norm"), self._joined()))
        for each in program.head:
            if not isinstance(each, op.Head):
                raise _refused(each)
            self.head = each

    def _take(self, ops: Sequence[Op], at: int, body: int) -> int:
        """Take the operation at `at` and what belongs to it; how many."""
        each = ops[at]
        after: Any = ops[at + 1] if at + 1 < len(ops) else None
        if isinstance(each, op.Embed):
            if not (isinstance(after, op.RmsNorm) and after.residual is None and after.x != after.out):
                raise _refused(each)
            norm = NormOf(after.weight, after.eps, after.offset)
            self.out.append(Embedding(matrix_of(each.table), each.scale, norm))
        elif isinstance(each, op.RmsNorm):
            self._take_norm(each)
        elif isinstance(each, op.Matmul):
            return self._take_product(each, after)
        elif isinstance(each, Mixture):
            self._take_mixture(each)
        elif isinstance(each, op.RopeWrite):
            self.rope = each
        elif isinstance(each, op.Attend):
            assert self.rope is not None
            self.out.append(Attention(self.rope, each, self._head_norms(), at >= body))
            self.head_norms = []
        elif isinstance(each, op.Add):
            if not self.pending:
                raise _refused(each)
        else:
            raise _refused(each)
        return 1

    def _take_norm(self, each: op.RmsNorm) -> None:
        if each.residual is not None:  # the norm of a branch, and its sum with x
            self.pending, self.post = True, each.weight
        elif each.x == each.out:
            last = self.out[-1]
            if not (isinstance(last, Normed) and last.out == "qkv"):
                raise _refused(each)
            self.head_norms.append(each)
        else:
            self.norm = NormOf(each.weight, each.eps, each.offset)

    def _take_product(self, each: op.Matmul, after: Any) -> int:
        matrix = matrix_of(each.linear)
        if self.norm is None:
            source = "gated" if self.out and isinstance(self.out[-1], Normed) else "attended"
            self.out.append(Product(matrix, source))
            self.pending, self.post = True, None
            return 1
        gates = isinstance(after, op.Gate)
        act = after.act if gates else None
        out = "gated" if gates else "qkv"
        self.out.append(Normed(matrix, self._norm_of("a product"), self._joined(), out, act))
        self.norm = None
        return 2 if gates else 1

    def _take_mixture(self, each: Mixture) -> None:
        stacks = each.gate_up, each.down
        if not all(isinstance(stack, Stack) for stack in stacks):
            raise UnsupportedModelError("device: the experts of a mixture do not lie on a device")
        gate_up, down = cast(tuple[Stack, Stack], stacks)
        router = matrix_of(each.router).weights
        norm = self._norm_of("a mixture of experts")
        self.out.append(Mixed(router, gate_up, down, each.top_k, each.norm_topk, each.act, norm, self._joined()))
        self.norm, self.pending = None, True

    def _norm_of(self, what: str) -> NormOf:
        if self.norm is None:
            raise UnsupportedModelError(
                f"device: {what} follows no norm of the residual stream; run this model on the CPU"
            )
        return self.norm

    def _joined(self) -> Turn:
        if not self.pending and not isinstance(self.out[-1], Embedding):
            raise UnsupportedModelError(
                "device: two norms of one residual stream, with no branch between them, have no kernel on a GPU; load the "
                "model with device='cpu'"
            )
        turn = Turn(self.turn, self.turn ^ self.pending, self.post if self.pending else None)
        self.turn, self.pending, self.post = turn.after, False, None
        return turn

    def _head_norms(self) -> HeadNorms | None:
        if not self.head_norms:
            return None
        q, k = self.head_norms
        return HeadNorms(q.weight, k.weight, q.eps, q.offset)


def matrix_of(linear: Any) -> Matrix:
    if not isinstance(linear, Matrix):
        raise UnsupportedModelError(f"device: a {type(linear).__name__} does not lie on a device")
    return linear


def _refused(each: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"device: {type(each).__name__} at this place has no kernel on a GPU; load the model with device='cpu'"
    )
