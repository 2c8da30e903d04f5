"""Joined operations: the bits of the operations one by one, on every build; refusals; what is left to Python."""

from collections.abc import Sequence

import pytest
import torch

from numem.errors import InputError
from numem.kernels import native
from numem.kernels import operations as op
from numem.kernels.joined import Joined, joined
from numem.kernels.linear import PackedLinear
from numem.kernels.pages import new_pools
from numem.kernels.program import Buffers, Call, Op, Part
from numem.kernels.quantised import QuantisedLinear
from tests.attention_fixtures import bits
from tests.kernel_fixtures import ISAS, needs_native, randn, restored

__all__ = ["restored"]

HEADS, KV, DIM, HIDDEN, INTER, VOCAB, LAYERS = 4, 2, 16, 64, 96, 50, 2


def linear(n: int, k: int, seed: int, form: str) -> op.Linear:
    weight = randn(n, k, seed=seed) / 8
    if form == "q8":
        return QuantisedLinear(weight, "q8", randn(n, seed=seed + 1))
    return PackedLinear(weight.to(getattr(torch, form)), randn(n, seed=seed + 1))


class Model:
    """Two layers: pre norms with a gate, causal; or norms of the sum with biases, bidirectional."""

    def __init__(self, kind: str, form: str) -> None:
        self.buffers = b = Buffers()
        qkv_width = (HEADS + 2 * KV) * DIM
        x, normed, branch, qkv = b.new(HIDDEN), b.new(HIDDEN), b.new(HIDDEN), b.new(qkv_width)
        q, k = b.columns(qkv, 0, HEADS * DIM), b.columns(qkv, HEADS * DIM, KV * DIM)
        attended, inner, gate_up = b.new(HEADS * DIM), b.new(INTER), b.new(2 * INTER)
        causal = kind == "causal"
        ops: list[Op] = [op.Embed(linear(VOCAB, HIDDEN, 1, form), x, 1.5 if causal else 1.0)]
        if not causal:
            ops.append(op.AddPositions(x, randn(64, HIDDEN, seed=2)))
        angles = randn(64, DIM // 2 if causal else 0, seed=3)

        def norm(source: Part, out: Part, residual: Part | None = None) -> Op:
            if causal:
                return op.RmsNorm(source, randn(HIDDEN, seed=4), 1e-6, 1.0, out, residual)
            return op.LayerNorm(source, randn(HIDDEN, seed=4), randn(HIDDEN, seed=5), 1e-12, 0.0, out)

        for layer in range(LAYERS):
            seed = 100 * layer
            ops += [norm(x, normed), op.Matmul(linear(qkv_width, HIDDEN, 10 + seed, form), normed, qkv)]
            ops += [op.RmsNorm(part, randn(DIM, seed=20), 1e-6, 0.0, part) for part in (q, k)]
            ops.append(op.RopeWrite(qkv, angles.cos(), angles.sin(), layer, HEADS, KV, DIM))
            ops.append(
                op.Attend(
                    q,
                    attended,
                    layer,
                    HEADS,
                    KV,
                    DIM,
                    0.25,
                    window=20 * layer,
                    causal=causal,
                    right=19 if layer and not causal else -1,
                    softcap=5.0 if causal else 0.0,
                )
            )
            ops.append(op.Matmul(linear(HIDDEN, HEADS * DIM, 30 + seed, form), attended, branch))
            ops.append(norm(branch, x, x) if causal else op.Add(branch, x, x))
            ops.append(norm(x, normed))
            if causal:
                ops.append(op.Matmul(linear(2 * INTER, HIDDEN, 40 + seed, form), normed, gate_up))
                ops.append(op.Gate(gate_up, inner, "gelu_tanh"))
            else:
                ops.append(op.Matmul(linear(INTER, HIDDEN, 40 + seed, form), normed, inner))
                ops.append(op.Activate(inner, "gelu"))
            ops.append(op.Matmul(linear(HIDDEN, INTER, 50 + seed, form), inner, x, x))
        self.ops, self.causal = tuple(ops), causal

    def call(self, rows: int, dtype: torch.dtype, tokens: Sequence[int] = ()) -> Call:
        k, v = new_pools(LAYERS, 6, KV, DIM, dtype)
        tensors = [torch.zeros(rows, width) for width in self.buffers.widths]
        return Call(
            tokens=torch.tensor([*tokens, *range(len(tokens), rows)]) % VOCAB,
            positions=torch.arange(rows),
            slots=torch.arange(rows) + 16,
            lane=torch.zeros(rows, dtype=torch.int32),
            tables=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
            wanted=torch.arange(rows),
            k=k,
            v=v,
            lengths=None if self.causal else torch.tensor([rows], dtype=torch.int32),
            parts=[tensors[p.buffer][:, p.start : p.start + p.width] for p in self.buffers.parts],
        )


def run(ops: Sequence[Op], call: Call) -> bytes:
    for each in ops:
        each.run(call)
    return b"".join(bits(t) for t in (*call.parts, call.k, call.v))


@needs_native
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "q8"])
@pytest.mark.parametrize("rows", [1, 13, 40])
def test_joined_operations_have_the_bits_of_single_ones(kind: str, form: str, rows: int) -> None:
    model = Model(kind, form)
    ops = joined(model.ops)
    assert len(ops) == 1 and isinstance(ops[0], Joined)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    want = run(model.ops, model.call(rows, dtype))
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            assert run(ops, model.call(rows, dtype)) == want


@needs_native
def test_what_the_extension_does_not_know_stays_between() -> None:
    model = Model("causal", "float32")
    look = op.Look("resid-mid", 0, model.buffers.parts[0])
    ops = (*model.ops[:9], look, *model.ops[9:])
    some = joined(ops)
    assert [type(each) for each in some] == [Joined, op.Look, Joined] and some[1] is look
    seen: list[bytes] = []
    calls = [model.call(5, torch.float32) for _ in range(2)]
    for call in calls:
        call.tap = lambda point, layer, array: seen.append(array.tobytes())
    assert run(ops, calls[0]) == run(some, calls[1])
    assert len(seen) == 2 and seen[0] == seen[1]


def test_without_the_extension_nothing_is_joined() -> None:
    native.use("torch")
    model = Model("causal", "float32")
    assert joined(model.ops) == model.ops


@needs_native
def test_a_refused_argument_is_named_as_by_the_operation() -> None:
    """And nothing after it runs: pages keep their bytes."""
    model = Model("causal", "float32")
    ops = joined(model.ops)
    wrong: list[tuple[str, torch.Tensor, str]] = [
        ("tokens", torch.tensor([0, VOCAB, 1]), "row id 50"),
        ("positions", torch.tensor([0, 64, 1]), "rope_write: row 1"),
        ("slots", torch.tensor([16, 17, 96]), "rope_write: row 2"),
        ("lane", torch.tensor([0, 1, 0], dtype=torch.int32), "paged_attention: row 1"),
        ("tables", torch.tensor([[6, 2, 3, 4]], dtype=torch.int32), "paged_attention: row 0"),
        ("slots", torch.tensor([16, 17]), "contiguous"),
        ("lane", torch.tensor([0, 0, 0]), "contiguous"),
        ("tables", torch.tensor([[1, 2, 3, 4]]), "int32"),
        ("k", torch.zeros(LAYERS, 6, KV, DIM, 8), "pages"),
        ("k", torch.zeros(1, 6, KV, DIM, 16), "pages"),
    ]
    for name, value, message in wrong:
        call = model.call(3, torch.float32)
        setattr(call, name, value)
        with pytest.raises(InputError, match=message):
            run(ops, call)
        if "rope_write" in message:
            assert not bool(call.k.any()) and not bool(call.v.any())
    call = Model("bidirectional", "float32").call(3, torch.float32)
    call.lengths = None
    with pytest.raises(InputError, match="lengths"):
        run(joined(Model("bidirectional", "float32").ops), call)
