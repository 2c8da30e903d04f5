"""The peer: FlashInfer's paged decode attention, built for what is measured and nothing else."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

PAGE = 16


class _Absent(ModuleType):
    """A module of the CUTLASS DSL, which is not installed and which paged decode does not use: any name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Anything:
    """What stands for any class or function of such a module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] == "cutlass":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def flashinfer() -> Any:
    """The package; its optional CUTLASS DSL is stubbed where it is missing."""
    try:
        import cutlass  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        sys.meta_path.append(_Finder())
    import flashinfer as package

    return package


def build(head_dims: Sequence[int], dtype: torch.dtype) -> None:
    """Build the two forms of decode for these head widths, all at once; nothing where they are built already."""
    jit = flashinfer().jit
    specs = []
    for width in head_dims:
        types = (dtype, dtype, dtype, torch.int32, width, width, 0, False, False)
        specs += [jit.gen_batch_decode_module(*types), jit.gen_batch_prefill_module("fa2", *types, False)]
    jit.build_jit_specs(specs)


def decode(
    tables: torch.Tensor, context: int, heads: int, kv_heads: int, head_dim: int, scale: float, tensor_cores: bool,
    dtype: torch.dtype,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]:  # fmt: skip
    """A planned decode: call(q [lanes, heads, head_dim], k, v [pages, kv_heads, 16, head_dim], out).

    Args:
        tables: int32 [lanes, pages of each], on the device.
        tensor_cores: the form that FlashInfer recommends for groups of query heads.
    """
    package = flashinfer()
    lanes, pages = tables.shape
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=tables.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
    last = context - (pages - 1) * PAGE
    wrapper.plan(
        torch.arange(0, lanes * pages + 1, pages, dtype=torch.int32, device=tables.device),
        tables.reshape(-1).contiguous(),
        torch.full((lanes,), last, dtype=torch.int32, device=tables.device),
        heads, kv_heads, head_dim, PAGE,
        q_data_type=dtype, kv_data_type=dtype, sm_scale=scale,
    )  # fmt: skip

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        wrapper.run(q, (k, v), out=out)

    return call
