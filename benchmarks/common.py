"""What the sections share: how a thing is timed, what the machine is, and where a result goes."""

import argparse
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Stat:
    """Quartiles of samples, in the unit of the samples, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Stat":
        """Nearest-rank quartiles; nan where there is no sample."""
        if not samples:
            return cls(math.nan, math.nan, math.nan, 0)
        ordered = sorted(samples)

        def rank(q: float) -> float:
            return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

        return cls(rank(0.5), rank(0.25), rank(0.75), len(ordered))

    def rate(self, amount: float) -> float:
        """`amount` per unit of the median."""
        return amount / self.median if self.median else math.nan


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine does at best, measured in this process.

    Attributes:
        copy: GB/s of a copy within the device, bytes read and written both counted.
        read: GB/s of reading alone (a sum).
        h2d, d2h: GB/s of pinned copies of 256 MiB.
        matmul: TFLOP/s of a bfloat16 product 8192^3 of random numbers.
        gap, gap_pdl: microseconds of an empty kernel in a CUDA graph, without and with programmatic dependent launch.
    """

    copy: float
    read: float
    h2d: float
    d2h: float
    matmul: float
    gap: float
    gap_pdl: float


@dataclass(slots=True)
class Bench:
    """One section's run.

    Attributes:
        section: its name, and that of its file of results.
        dry: tiny shapes on the CPU, to try the script itself; nothing is written unless `out` is given.
        args: of the command line.
        rows: what was measured, printed as it comes.
        warm: what was resident or warm, in words.
    """

    section: str
    dry: bool
    args: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)
    warm: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.dry else "cuda")

    def size(self, real: int, tiny: int) -> int:
        """A size: `tiny` in a dry run."""
        return tiny if self.dry else real

    def add(self, what: str, **values: Any) -> None:
        """Keep and print one measurement; a `Stat` is written as its quartiles."""
        row = {"what": what, **{key: asdict(v) if isinstance(v, Stat) else v for key, v in values.items()}}
        self.rows.append(row)
        print("  ".join([f"{what:<44}", *(f"{key} {_short(v)}" for key, v in values.items())]), flush=True)

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """What `call` gives, or None where it failed, which is said and kept: the rest of a section goes on."""
        began = time.perf_counter()
        try:
            return call()
        except failures() as error:
            line = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            self.failures.append(line)
            print("did not run:", line, flush=True)
            if self.args.trace:
                import traceback

                traceback.print_exc()
            return None
        finally:
            print(f"    [{what}: {time.perf_counter() - began:.1f} s]", flush=True)

    def write(self, ceilings: Ceilings | None) -> None:
        """Append the record of this run to <out>/<section>.jsonl."""
        if self.dry and self.args.out is None:
            return
        folder = Path(self.args.out or RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            **machine(self.args.commit),
            "section": self.section,
            "dry": self.dry,
            "warm": self.warm,
            "ceilings": None if ceilings is None else asdict(ceilings),
            "rows": self.rows,
            "failures": self.failures,
        }
        with (folder / f"{self.section}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(_plain(record)) + "\n")


def failures() -> tuple[type[Exception], ...]:
    """What a measurement that does not run raises; anything else ends the script."""
    found: list[type[Exception]] = [
        RuntimeError, ValueError, TypeError, AttributeError, ImportError, LookupError, AssertionError, OSError,
        ArithmeticError,
    ]  # fmt: skip
    from numem.errors import NumemError

    found.append(NumemError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return tuple(found)
    return (*found, TritonError)


def machine(commit: str) -> dict[str, Any]:
    """Date, GPU, driver and versions."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit,
        "gpu": gpu,
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def times(call: Callable[[], Any], repeats: int, warm: int = 3, before: Callable[[], Any] | None = None) -> list[float]:
    """Microseconds of each of `repeats` calls, by device events where there is a GPU.

    Calls are queued without waiting, so that the host's own time is hidden where the device is the slower one.

    Args:
        before: runs ahead of each call, outside its time.
    """
    import torch

    for _ in range(warm):
        if before is not None:
            before()
        call()
    if not torch.cuda.is_available():
        out = []
        for _ in range(repeats):
            if before is not None:
                before()
            began = time.perf_counter()
            call()
            out.append((time.perf_counter() - began) * 1e6)
        return out
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        if before is not None:
            before()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairs]


def wall(call: Callable[[], Any], repeats: int, warm: int = 1) -> list[float]:
    """Microseconds of each call by the host's clock, the device idle before and after it."""
    out = []
    for at in range(warm + repeats):
        settle()
        began = time.perf_counter()
        call()
        settle()
        if at >= warm:
            out.append((time.perf_counter() - began) * 1e6)
    return out


def settle() -> None:
    """Wait for the device, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def flusher(bench: Bench) -> Callable[[], None]:
    """What takes everything else out of the L2 cache: 256 MiB are read, so that no line has to be written back."""
    import torch

    big = torch.ones(bench.size(256 << 20, 1 << 10) // 4, device=bench.device)
    out = torch.empty((), device=bench.device)

    def flush() -> None:
        torch.sum(big, 0, out=out)

    return flush


def release() -> None:
    """Give memory that is no longer used back to the device."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _short(value: Any) -> str:
    if isinstance(value, Stat):
        return f"{_short(value.median)} ({_short(value.low)}..{_short(value.high)}; {value.count})"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def _plain(value: Any) -> Any:
    """Without nan, which JSON has not, and floats of six figures."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _driver() -> str | None:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.split("\n")[0].strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
