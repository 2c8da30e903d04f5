"""Compiles for compute capability 9.0, without a GPU, every kernel that models launch: python -m tests.gpu.compiling.

The interpreter takes what the compiler refuses: types, shapes in registers, assembly. Nothing runs; each launch is
compiled down to machine code by the assembler that comes with Triton, and one line says what it became.
"""

import re
import subprocess
import tempfile
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.shapes import Random, config_of, descriptor_of, weights_of
from numem.kernels.cuda import language, linear, pages, segments
from numem.models.device_transformer import DeviceTransformer
from numem.runtime.device.form import TokenMajor
from numem.runtime.device.state import LaneState, Step
from numem.runtime.engine import Engine, Span
from numem.runtime.paging.pages import PageStorage
from numem.runtime.sampling import Sampler

CPU = torch.device("cpu")
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("8b", "bf16", {}),
    ("8b", "q4", {}),
    ("0.6b", "q8", {}),
    ("270m", "bf16", {}),
    ("30b", "q8", {}),
    # as Llama 3.2 3B: three blocks of k
    ("8b", "q8", {"hidden_size": 3072, "num_attention_heads": 24, "intermediate_size": 8192}),
    # as Qwen2.5 7B and Gemma 2 9B: four blocks of k
    ("8b", "bf16", {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}),
)
SHARED_MEMORY = 232448  # bytes of a program on that capability
REGISTERS_ALONE = {"few_rows_kernel"}
"""Kernels that must not spill: the weights that they hold in registers are ready before their wait."""
POSITIONS = 1024


class Driver:
    """What Triton asks of a device before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Takes the place of launching."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[str, str], Any] = {}
        self.layouts: dict[str, str] = {}
        self._launch = JITFunction.run

    def install(self) -> None:
        driver.set_active(Driver())
        compiler = self

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = compiler._launch(function, *args, grid=grid, warmup=True, **options)
            compiler._note(function.__name__, kernel, options)
            return kernel

        JITFunction.run = run
        language.PDL_AVAILABLE = language.DESCRIPTORS = True

    def _note(self, name: str, kernel: Any, options: dict[str, Any]) -> None:
        if (name, kernel.hash) in self.compiled:
            return
        self.compiled[name, kernel.hash] = kernel
        shared = kernel.metadata.shared
        if not kernel.asm["cubin"] or shared > SHARED_MEMORY:
            raise SystemExit(f"{name}: {shared} bytes of shared memory, {len(kernel.asm['cubin'])} bytes of code")
        self._same_sums(name, kernel.asm["ttgir"])
        registers, stack = self._room(kernel.asm["cubin"])
        if stack and name in REGISTERS_ALONE:
            raise SystemExit(f"{name}: {stack} bytes of registers spill, with {options}")
        if options.get("PDL", False):
            self._waits(name, kernel.asm["ptx"])
        print(f"{name}: {kernel.metadata.num_warps} warps, {shared} bytes shared, {registers} registers", flush=True)

    def _room(self, code: bytes) -> tuple[int, int]:
        """Registers of a thread and bytes of its stack, which has what finds no room in them."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            said = subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
                text=True,
                capture_output=True,
                check=True,
            ).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", said)
        assert found is not None, said
        return int(found[1]), int(found[2])

    def _waits(self, name: str, code: str) -> None:
        """A kernel that may start early waits before it writes anything, and lets the next one start."""
        start, wait = code.find("griddepcontrol.launch_dependents"), code.find("griddepcontrol.wait")
        if start < 0 or wait < 0 or re.search(r"\b(st\.global|atom|red)\b", code[:wait]):
            raise SystemExit(f"{name}: starts the next kernel at {start}, waits at {wait}, or writes before that")

    def _same_sums(self, name: str, code: str) -> None:
        """A sum over a whole row runs in the order of the layout that the compiler gave the row: it must be one for each
        width in all kernels."""
        layouts = dict(re.findall(r"^(#\w+) = (#ttg.+)$", code, re.MULTILINE))
        for width, layout in re.findall(r"tt\.reshape \S+ allow_reorder : tensor<(\d+xf32), (#\w+)>", code):
            expected = self.layouts.setdefault(width, layouts[layout])
            if layouts[layout] != expected:
                raise SystemExit(f"{name}: a row of {width} lies as {layouts[layout]}, elsewhere as {expected}")


def compile_model(shape: str, form: str, other: dict[str, Any]) -> None:
    """Steps of few and of many lanes, greedy and sampled; passes of many rows; page moves."""
    config = config_of(shape) | {"num_hidden_layers": 2, "vocab_size": 5120} | other
    if "layer_types" in config:
        config["layer_types"] = ["sliding_attention", "full_attention"]
    if "num_experts" in config:
        config["num_experts"] = 12
    d = descriptor_of(config)
    weights = weights_of(d, Random(form, torch.bfloat16, CPU), POSITIONS)
    decoder = DeviceTransformer(d, weights, dtype="bfloat16", max_position=POSITIONS, device=CPU)
    storage = PageStorage(decoder.spec, d.kv_heads, d.head_dim, 128, form=TokenMajor(CPU))
    for lanes in (1, 2, 8, 32):
        state = LaneState(lanes, 80, CPU)
        state.load([Step(1, 3, [1], Sampler())] * lanes)
        history = torch.zeros((8, lanes), dtype=torch.int64)
        for tiles, sampled in ((1, False), (8, False), (64, False), (8, True)):
            decoder.step(state, storage, history, tiles, sampled, d.vocab - 3)
    engine = Engine(decoder, pages=8)
    engine.storage = storage
    for rows in (40, 600):
        engine.evaluate([Span(range(64), 0, [1] * rows), Span(range(64, 128), 0, [1] * rows)])
    k, v = storage.k, storage.v
    table = torch.arange(40, dtype=torch.int32)
    payload = torch.zeros((2, d.layers, 300, d.kv_heads * d.head_dim), dtype=k.dtype)
    for gather in (False, True):
        pages.move(payload, k, v, table, 5, layers=None, skip=0, gather=gather)
    pages.copy_pages(k, v, torch.from_numpy(np.array([[1, 2]], dtype=np.int32)))
    pages.hashes(k, v, table)


def main() -> None:
    compiler = Compiler()
    compiler.install()
    linear.proved = lambda weight, rows: False
    segments.DESCRIBED = 512  # no text here has more rows than 600
    for case in CASES:
        compile_model(*case)
    names = sorted({name for name, _ in compiler.compiled})
    print(f"compiled {len(compiler.compiled)} forms of {len(names)} kernels: {' '.join(names)}")


if __name__ == "__main__":
    main()
