"""Devices that models are loaded on: a name to a checked device.

    cpu         the CPU
    cuda        the current NVIDIA GPU, which is cuda:0 unless the process chose another
    cuda:N      the GPU of that number
    auto        the GPU with the most free memory where there is one and the model fits and is run there, else the CPU

Where several GPUs serve one runtime: `cuda:all`, or a list such as `cuda:0,cuda:1`.
"""

import importlib.util
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from numem.errors import CapacityError, UnsupportedModelError
from numem.models.architecture.descriptor import Descriptor

NAMES = "cpu, cuda, cuda:N or auto"
CPU = torch.device("cpu")

OLDEST = (8, 0)
"""Compute capability from which on GPUs multiply bfloat16."""

MOST_GROUP = 31
"""Query heads of a key head that attention of a decode step takes."""

_CUDA = re.compile(r"cuda(?::(\d{1,3}))?")


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU of this process.

    Attributes:
        index: its number in torch.
        name: as the driver gives it, for example "NVIDIA H200".
        capability: compute capability (major, minor).
    """

    index: int
    name: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, index: int) -> "Gpu":
        return cls(index, torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def free(self) -> int:
        """Bytes that are free now. Asking opens the GPU, which costs it some hundred MB for this process."""
        return int(torch.cuda.mem_get_info(self.index)[0])

    @property
    def device_class(self) -> str:
        """For the identity: capability and name, as equal capabilities of other sizes may compute otherwise."""
        return f"cuda-sm{self.capability[0]}{self.capability[1]}-{self.name}"


def device_class(device: torch.device) -> str:
    """The kind of device in an identity: "cpu-x86_64", "cuda-sm90-NVIDIA H200"."""
    if device.type != "cuda":
        return f"cpu-{platform.machine()}"
    return Gpu.of(torch.cuda.current_device() if device.index is None else device.index).device_class


def resolve_device(name: str, *, needs: int = 0, refused: str = "") -> torch.device:
    """The device of a name, with its number where it is a GPU.

    Args:
        needs: bytes that the model takes there.
        refused: why the model is not run on a GPU, empty where it is: "auto" takes the CPU then.

    Raises:
        UnsupportedModelError: an unknown name, a GPU that is not there or too old, no Triton, or a model that is not run
            on a GPU.
        CapacityError: a GPU that is named has not that much free memory.
    """
    if name == "cpu":
        return CPU
    if name == "auto":
        return CPU if refused else _roomiest(needs)
    found = _CUDA.fullmatch(name)
    if found is None:
        raise UnsupportedModelError(f"device {name!r} is none that models are loaded on; use {NAMES}")
    problem = _unusable()
    if problem:
        raise UnsupportedModelError(f"device {name!r}: {problem}")
    if refused:
        raise UnsupportedModelError(f"device {name!r}: {refused}; use device='cpu'")
    index = torch.cuda.current_device() if found[1] is None else int(found[1])
    count = torch.cuda.device_count()
    if index >= count:
        last = "" if count == 1 else f" to cuda:{count - 1}"
        raise UnsupportedModelError(f"device {name!r}: this process sees cuda:0{last}; use one that is there")
    gpu = Gpu.of(index)
    if gpu.capability < OLDEST:
        raise UnsupportedModelError(f"device {name!r}: {_too_old(gpu)}; use device='cpu'")
    if needs and gpu.free < needs:
        raise CapacityError(
            f"device {name!r}: the model takes {needs / 1e9:.1f} GB and {gpu.free / 1e9:.1f} GB are free; quantise it, "
            "end what else runs there, or use device='cpu'"
        )
    return gpu.device


def device_names(name: str) -> tuple[str, ...]:
    """The single devices of a name that may stand for several GPUs, each once: `cuda:all`, `cuda:0,cuda:1`.

    Raises:
        UnsupportedModelError: no GPU for `cuda:all`, or a list that is not of different GPUs by number.
    """
    if name == "cuda:all":
        problem = _unusable()
        if problem:
            raise UnsupportedModelError(f"device {name!r}: {problem}")
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    if "," not in name:
        return (name,)
    names = tuple(part.strip() for part in name.split(","))
    if len(set(names)) != len(names) or not all(":" in part and _CUDA.fullmatch(part) for part in names):
        raise UnsupportedModelError(f"device {name!r}: a list names different GPUs by number, as in cuda:0,cuda:1")
    return names


def gpu_refuses(d: Descriptor, dtype: str = "bfloat16") -> str:
    """Why a model in a dtype is not run on a GPU, empty where it is."""
    if not d.causal:
        return f"{d.family} with rows that see what follows them is run on the CPU alone"
    if dtype != "bfloat16":
        return f"{dtype} is run on the CPU alone; on a GPU use dtype='bfloat16'"
    if d.heads // d.kv_heads > MOST_GROUP:
        return f"{d.family} with more than {MOST_GROUP} query heads a key head is run on the CPU alone"
    if d.norm.kind != "rms" or not d.gated or d.positions != "rope" or not {"input", "pre_ffn"} <= set(d.norms):
        return f"the layers of {d.family} (norm {d.norm.kind}, {', '.join(d.norms)}) are run on the CPU alone"
    return ""


def current(device: torch.device) -> AbstractContextManager[object]:
    """A block in which this is the thread's current GPU, where kernels are launched; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def use_here(device: torch.device) -> None:
    """Make this the calling thread's GPU for good; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _roomiest(needs: int) -> torch.device:
    if _unusable():
        return CPU
    gpus = [gpu for gpu in map(Gpu.of, range(torch.cuda.device_count())) if gpu.capability >= OLDEST]
    free = {gpu: gpu.free for gpu in gpus}
    best = max(gpus, key=lambda gpu: (free[gpu], -gpu.index), default=None)
    return CPU if best is None or free[best] < needs else best.device


def _unusable() -> str:
    """Why no GPU of this machine can be used, with the remedy; empty where one may."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA; install one that has, or use device='cpu' or 'auto'"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is seen here; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use device='cpu' or 'auto'"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; `pip install numem[cuda]`, or use device='cpu'"
    return ""


def _too_old(gpu: Gpu) -> str:
    needed, found = (".".join(map(str, c)) for c in (OLDEST, gpu.capability))
    return f"{gpu.name} has compute capability {found}; {needed} or newer is needed"
