"""Choice of instruction set, threads, the policy's name, the self-test and its golden digests."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from numem.errors import InputError, ModelError
from numem.kernels import linear, native
from numem.kernels.policy import policy_name
from numem.kernels.selftest import Shapes, self_test
from tests.kernel_fixtures import ISAS, needs_native, restored

__all__ = ["restored"]


TINY = Shapes(hidden=48, inter=80, heads=6, kv_heads=2, head_dim=16, vocab=100)

# What policy cpu-fma-v1 computes at the tiny shapes, on any machine. A change here is a new policy.
GOLDEN = {
    "float32": "e9f8b5607ce744dc34202e8e82004db8918895642040a0632c29d1f076299dc3",
    "bfloat16": "00682ff236790c84d72e770a1d1208be0635bd276781116889d61916186d7e59",
}


def test_the_extension_is_built_where_there_is_a_compiler() -> None:
    """Otherwise every test of the native kernels would be left out."""
    if shutil.which("cc"):
        assert native.available(), "run `make setup`, or `pip install -e .`, to build numem.kernels._native"


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_test_digest_is_golden_on_every_build_and_thread_count(dtype: str) -> None:
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            assert self_test(replace(TINY, dtype=dtype)).hex() == GOLDEN[dtype], (isa, threads)


FORMS: list[dict[str, Any]] = [
    {"act": "gelu_tanh"},
    {"act": "gelu"},
    {"gated": False},
    {"centred": True},
    {"sandwich": True},
    {"offset": 1.0},
    {"attn_softcap": 50.0},
    {"final_softcap": 30.0},
    {"causal": False},
]


@needs_native
def test_every_form_joins_the_digest_and_is_equal_on_every_build() -> None:
    """A model is tested with what it uses; without it, its digest stays as it was."""
    found = set()
    for form in FORMS:
        digests = set()
        for isa in ISAS:
            native.use(isa)
            digests.add(self_test(replace(TINY, **form)).hex())
        assert len(digests) == 1
        found |= digests
    assert len(found) == len(FORMS) and GOLDEN["float32"] not in found


def test_self_test_of_the_torch_policy_is_repeatable_and_its_own() -> None:
    native.use("torch")
    digest = self_test(TINY)
    assert digest == self_test(TINY) and len(digest) == 32
    assert digest.hex() != GOLDEN["float32"]
    assert digest != self_test(replace(TINY, inter=96))


def test_self_test_refuses_kernels_that_are_not_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uneven(linear.PackedLinear):
        def __call__(
            self,
            x: torch.Tensor,
            out: torch.Tensor | None = None,
            residual: torch.Tensor | None = None,
            peaks: linear.Peaks | None = None,
        ) -> torch.Tensor:
            return super().__call__(x, out, residual, peaks) * (1.0 if len(x) > 1 else 1.0 + 2.0**-20)

    monkeypatch.setattr("numem.kernels.selftest.PackedLinear", Uneven)
    with pytest.raises(ModelError, match="a row alone differs"):
        self_test(TINY)


def test_self_test_refuses_other_dtypes() -> None:
    with pytest.raises(InputError, match="float16"):
        self_test(replace(TINY, dtype="float16"))


def test_policy_follows_the_path_in_use() -> None:
    for isa in ISAS:
        native.use(isa)
        assert policy_name() == "cpu-fma-v1" and native.isa() == isa
    native.use("torch")
    assert policy_name() == "cpu-torch-v1" and native.isa() == "torch"


def test_unknown_instruction_sets_and_thread_counts_are_refused() -> None:
    before = native.isa(), native.threads()
    with pytest.raises(InputError, match="sse9"):
        native.use("sse9")
    with pytest.raises(InputError, match="threads 0"):
        native.set_threads(0)
    assert (native.isa(), native.threads()) == before


def test_without_the_extension_everything_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "active", False)
    monkeypatch.setattr(native, "_isa", "torch")
    assert not native.available() and native.isas() == []
    with pytest.raises(ModelError, match="not built"):
        native.function("nm_linear")()
    assert linear.PackedLinear(torch.ones(2, 2))(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    assert len(self_test(TINY)) == 32
    native.use("torch")


@needs_native
def test_calls_from_several_threads_at_once_give_the_same_bits() -> None:
    """Callers share the pool of threads: one has it, the others work alone, nobody waits or mixes results."""
    native.set_threads(3)
    layer = linear.PackedLinear(torch.randn(200, 96))
    inputs = [torch.randn(rows, 96) for rows in (1, 5, 40, 130)]
    want = [layer(x) for x in inputs]

    def run(at: int) -> bool:
        return all(torch.equal(layer(inputs[at]), want[at]) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(run, range(4)))
