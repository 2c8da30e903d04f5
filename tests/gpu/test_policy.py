"""The numeric policy of a GPU: its self-test passes, repeats, tells arithmetic apart, and notices rows that depend."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from numem.errors import ModelError
from numem.kernels.cuda import segments
from numem.kernels.cuda.selftest import POLICY, Inputs, require_equal
from numem.models import device_numerics
from numem.models.architecture.descriptor import Bias, Descriptor, Moe, Norm
from numem.models.architecture.rope import Rope
from numem.models.device_numerics import device_policy, shrunk

PLAIN = Descriptor(
    family="llama",
    hidden=64,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=32,
    inter=64,
    vocab=64,
    max_pos=4096,
    attn_scale=32**-0.5,
    tied_head=True,
    layer_kinds=("full",) * 3,
    rope=Rope("default", 50000.0, 32),
    names={},
)
GEMMA = replace(
    PLAIN,
    family="gemma3_text",
    norm=Norm(offset=1.0),
    norms=("input", "post_attn", "pre_ffn", "post_ffn"),
    layer_kinds=("sliding", "sliding", "full"),
    window=20,
    qk_norm=True,
    rope_local=Rope("default", 10000.0, 32),
    act="gelu_tanh",
    embed_scale=8.0,
)
MIXED = replace(
    PLAIN, family="qwen3_moe", moe=Moe(experts=5, top_k=2, inter=32, norm_topk=True, layers=(False, True, True))
)
LLAMA_8B = replace(
    PLAIN, hidden=4096, heads=32, kv_heads=8, head_dim=128, inter=14336, vocab=128256, attn_scale=128**-0.5,
    rope=Rope("default", 500000.0, 128),
)  # fmt: skip
QWEN3 = replace(
    PLAIN, family="qwen3", hidden=1024, heads=16, kv_heads=8, head_dim=128, inter=3072, vocab=151936, qk_norm=True,
    attn_scale=128**-0.5, rope=Rope("default", 1000000.0, 128), attn_bias=Bias(),
)  # fmt: skip
GEMMA_270M = replace(
    GEMMA, hidden=640, heads=4, kv_heads=1, head_dim=256, inter=2048, vocab=262144, window=512, attn_scale=256**-0.5,
    rope=Rope("default", 1000000.0, 256), rope_local=Rope("default", 10000.0, 256), embed_scale=25.25,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short(big: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer forms where kernels are interpreted, and no bytes: its products follow the order of a library for the CPU."""

    def close(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
        # sums of 64 float32 products of size 1, through two layers
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=what)

    if not big:
        monkeypatch.setattr(device_numerics, "LANES", (3, 9))
        monkeypatch.setattr(device_numerics, "require_equal", close)
    yield


@pytest.fixture
def length(big: bool) -> int:
    return device_numerics.LENGTH if big else 36


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_rows_stand_alone(device: torch.device, dtypes: list[torch.dtype], length: int, big: bool) -> None:
    """Past a tile of keys, through a window, with every norm; a mixture of experts beside a plain layer."""
    gemma = GEMMA if big else replace(GEMMA, layer_kinds=("sliding",) * 3)
    for d, dtype in itertools.product((gemma, MIXED), dtypes):
        policy = device_policy(d, name_of(dtype), device, length=length)
        assert policy.name == POLICY == "cuda-mma-v1" and len(policy.self_test) == 32


def test_the_digest_tells_arithmetic_apart_and_nothing_else(
    device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """Another format or activation is another test; more layers, or a format that is held dense, are not."""
    if not big:
        pytest.skip("takes a minute in the interpreter")
    dtype, length = name_of(dtypes[0]), 700
    policies = [
        device_policy(d, dtype, device, quantised=formats, length=length)
        for d, formats in (
            (PLAIN, ()),
            (replace(PLAIN, layers=9, layer_kinds=("full",) * 9), ()),
            (PLAIN, ("q6k",)),
            (PLAIN, ("q8",)),
            (replace(PLAIN, act="gelu"), ()),
        )
    ]
    assert policies[0] == policies[1] == policies[2]
    assert len({policy.self_test for policy in policies}) == 3


@pytest.mark.parametrize("kind", ["q8", "q4", "q4a", "q4k"])
def test_packed_formats(device: torch.device, dtypes: list[torch.dtype], big: bool, kind: str) -> None:
    d = replace(PLAIN, hidden=256, inter=256, heads=8)
    for dtype in dtypes:
        inputs = Inputs(device, dtype)
        matrix = inputs.matrix(48, 256, kind)
        assert matrix.bits == (8 if kind == "q8" else 4) and matrix.reference().float().abs().amax() < 4
        if big:
            device_policy(d, name_of(dtype), device, quantised=(kind,))


@pytest.mark.parametrize("family", [LLAMA_8B, QWEN3, GEMMA_270M], ids=lambda d: f"{d.family}-{d.hidden}")
def test_true_shapes_in_time(device: torch.device, big: bool, family: Descriptor) -> None:
    if not big:
        pytest.skip("the shapes of real models need a GPU")
    for kinds in ((), ("q8",)):
        first = device_policy(family, "bfloat16", device, quantised=kinds)  # compiles
        torch.cuda.synchronize()
        began = time.perf_counter()
        again = device_policy(family, "bfloat16", device, quantised=kinds)
        took = time.perf_counter() - began
        assert again == first
        print(f"{family.family} {family.hidden} {kinds}: {took:.2f} s")
        assert took < 30.0, "a few seconds at most while nothing else runs"


def test_a_row_that_depends_on_how_it_is_computed_is_refused(
    device: torch.device, dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of many rows with another order of sums, as a library's would be."""

    def other(weight: torch.Tensor, bias: Any, h: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        out.copy_((h.double() @ weight.double().T).to(out.dtype))
        out[0, 0] = torch.nextafter(out[0, 0], torch.full_like(out[0, 0], 9.0))

    monkeypatch.setattr(segments, "many_rows", other)
    monkeypatch.setattr(device_numerics, "require_equal", require_equal)
    with pytest.raises(
        ModelError, match="self-test: llama .*: a row's bytes depend on how it was computed.*device='cpu'"
    ):
        device_policy(PLAIN, name_of(dtypes[0]), device, length=36)


def test_bytes_are_compared_not_values() -> None:
    zero = torch.zeros(3)
    require_equal(zero, zero.clone(), "zeros")
    with pytest.raises(ModelError, match="self-test: signs"):
        require_equal(zero, -zero, "signs")
    nan = torch.full((2,), torch.nan)
    require_equal(nan, nan.clone(), "NaN")


def test_one_layer_of_each_kind(device: torch.device) -> None:
    assert shrunk(PLAIN).layers == 1 and shrunk(GEMMA).layer_kinds == ("full", "sliding")
    assert shrunk(MIXED).moe == replace(MIXED.moe or Moe(0, 0, 0, False, ()), layers=(False, True))
    assert shrunk(LLAMA_8B).vocab == device_numerics.VOCAB


def test_inputs_follow_from_their_order_alone(device: torch.device) -> None:
    """The pool wraps around; rows differ."""
    a, b = (Inputs(device, torch.float32) for _ in range(2))
    first = a.take(3, 1 << 20)
    assert torch.equal(first, b.take(3, 1 << 20)) and not torch.equal(first[0], first[1])
    assert torch.equal(a.values(5), b.values(5)) and not torch.equal(a.values(5), b.matrix(1, 5).weights[0])
