"""The compiled kernels: loading, choice of instruction set, threads.

The extension `numem.kernels._native` is one shared object with a build of the same kernels per instruction set. Its functions are
called through ctypes, which releases the interpreter lock. When it is missing, every kernel runs its torch reference
under another numeric policy (`numem.kernels.policy`).
"""

import ctypes
import importlib.machinery
from collections.abc import Callable
from pathlib import Path

import torch

from numem.errors import InputError, ModelError

PAGE = 16  # tokens of a page
PANEL = 32  # weight columns of a panel
SPLIT = 512  # keys of an attention split, at absolute multiples

_ABI = 14
_ISAS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16")

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "nm_abi": (_I, []),
    "nm_isas": (_I, []),
    "nm_use": (_I, [_I]),
    "nm_set_threads": (None, [_I]),
    "nm_pack": (None, [_P, _P, _I, _I, _I]),
    "nm_rows": (_I, [_P, _P, _P, _I]),
    "nm_linear": (_I, [_P, _P, _I, _P, _I, _P, _I, _I, _I, _P, _P]),
    "nm_normalise": (None, [_P, _I]),
    "nm_gated": (None, [_P, _P, _I, _I, _I]),
    "nm_activate": (None, [_P, _P, _I, _I, _I]),
    "nm_softcap": (None, [_P, _I, _I, _I, _F, _I, _P, _P]),
    "nm_exp": (None, [_P, _P, _I]),
    "nm_rope_write": (_I, [_P, _I, _P, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I]),
    "nm_paged_attention": (_I, [_P]),
    "nm_quantised_linear": (_I, [_P, _P, _I, _P, _I, _P, _I, _I, _I, _P, _P]),
    "nm_quantised_rows": (_I, [_P, _P, _P, _I]),
    "nm_quantise": (_I, [_P, _I, _I, _I, _P, _P]),
    "nm_run": (_I, [_P, _I, _P]),
    "nm_read": (ctypes.c_uint64, [_P, _I]),
    "nm_move": (_I, [_P, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _I, _I]),
}


class Matrix(ctypes.Structure):
    """`nm_matrix`: a packed weight matrix; the memory belongs to the caller."""

    _fields_ = [("panels", _P), ("bias", _P), ("n", _I), ("k", _I), ("bf16", _I)]


class Part(ctypes.Structure):
    """`nm_part`: rows of a weight as they lie in memory; `type` 0 float32, 1 float16, 2 bfloat16."""

    _fields_ = [("data", _P), ("rows", _I), ("stride", _I), ("type", _I)]


class Op(ctypes.Structure):
    """`nm_op` of program.c: one kernel call of a program."""

    _fields_ = [
        ("kind", _I),
        ("object", _P),
        ("other", _P),
        *((name, _I) for name in ("x", "out", "residual", "quantised", "width", "groups", "choice", "limit")),
        *((name, _I) for name in ("layer", "heads", "kv_heads", "head_dim", "half", "window", "right")),
        *((name, _F) for name in ("eps", "offset", "scale", "softcap")),
    ]


class Call(ctypes.Structure):
    """`nm_call` of program.c: what a program runs on."""

    _fields_ = [
        ("parts", _P),
        ("strides", _P),
        ("rows", _I),
        *((name, _P) for name in ("tokens", "positions", "slots", "lane", "tables", "lengths")),
        ("lanes", _I),
        ("table_width", _I),
        ("k", _P),
        ("v", _P),
        ("layer_bytes", _I),
        ("pages", _I),
        ("bf16", _I),
    ]


class Norm(ctypes.Structure):
    """`nm_norm`: arguments of a norm of rows."""

    _fields_ = [
        ("x", _P),
        ("x_stride", _I),
        ("weight", _P),
        ("bias", _P),
        ("residual", _P),
        ("r_stride", _I),
        ("out", _P),
        ("o_stride", _I),
        ("rows", _I),
        ("groups", _I),
        ("width", _I),
        ("eps", _F),
        ("offset", _F),
    ]


class Quantised(ctypes.Structure):
    """`nm_quantised`: a quantised weight matrix; the memory belongs to the caller."""

    _fields_ = [("records", _P), ("units", _P), ("bias", _P), ("n", _I), ("k", _I), ("format", _I)]


class Attention(ctypes.Structure):
    """`nm_attention`: arguments of paged attention."""

    _fields_ = [
        ("q", _P),
        ("q_stride", _I),
        ("k_pages", _P),
        ("v_pages", _P),
        ("pages", _I),
        ("tables", _P),
        ("lanes", _I),
        ("table_width", _I),
        ("row_lane", _P),
        ("positions", _P),
        ("out", _P),
        ("out_stride", _I),
        ("rows", _I),
        ("heads", _I),
        ("kv_heads", _I),
        ("head_dim", _I),
        ("window", _I),
        ("lengths", _P),
        ("right", _I),
        ("bf16", _I),
        ("scale", _F),
        ("softcap", _F),
    ]


def _load() -> ctypes.CDLL | None:
    here = Path(__file__).resolve().parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = here / f"_native{suffix}"
        if not path.is_file():
            continue
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise ModelError(f"{path} lacks {name}: rebuild it with `python setup.py build_ext --inplace`")
            function.restype, function.argtypes = result, arguments
        if library.nm_abi() != _ABI:
            raise ModelError(f"{path} is of another version: rebuild it with `python setup.py build_ext --inplace`")
        return library
    return None


_library = _load()
_isa = "torch"
_threads = 1

# Whether calls go to the extension; read by every kernel, set by `use`.
active = False


def function(name: str) -> Callable[..., int]:
    """An exported function; one that always fails when the extension is missing (then `active` is False)."""
    if _library is None:

        def missing(*arguments: object) -> int:
            raise ModelError(f"{name}: the extension numem.kernels._native is not built")

        return missing
    found: Callable[..., int] = getattr(_library, name)
    return found


def available() -> bool:
    """Whether the extension is built and loaded."""
    return _library is not None


def isas() -> list[str]:
    """Instruction sets this machine can run, fastest first; empty when the extension is missing."""
    if _library is None:
        return []
    mask = int(_library.nm_isas())
    return [name for i, name in reversed(list(enumerate(_ISAS))) if mask >> i & 1]


def isa() -> str:
    """Instruction set in use; "torch" when the references run."""
    return _isa


def use(name: str) -> None:
    """Select an instruction set of `isas()`, or "torch" for the references; for tests, no calls may be running."""
    global _isa, active
    if name != "torch":
        if name not in isas():
            raise InputError(f"instruction set {name!r} is not usable here; use one of {[*isas(), 'torch']}")
        function("nm_use")(_ISAS.index(name))
    _isa, active = name, name != "torch"


def read_bytes(tensor: torch.Tensor) -> int:
    """Read a contiguous tensor of a multiple of 8 bytes with as many threads as a kernel: its words' exclusive or."""
    if not tensor.is_contiguous() or tensor.nbytes % 8 or not tensor.is_cpu:
        raise InputError(f"read: {tensor.nbytes} bytes must be contiguous, on the CPU and a multiple of 8")
    return function("nm_read")(tensor.data_ptr(), tensor.nbytes)


def set_threads(n: int) -> None:
    """Number of threads of one kernel call; bits do not depend on it."""
    global _threads
    if n < 1:
        raise InputError(f"threads {n}: at least one is needed")
    _threads = n
    if _library is not None:
        _library.nm_set_threads(n)


def threads() -> int:
    """Number of threads of one kernel call."""
    return _threads


if _library is not None:
    use(isas()[0])
set_threads(torch.get_num_threads())
