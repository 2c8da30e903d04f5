"""Where the time of a decode step goes on one GPU: the device's clock when each launch gets past its wait.

python benchmarks/probe_stamps.py [SHAPE [FORM [LANES]]]       270m, 0.6b or 8b; bf16 or q8

A profiler's times overlap where launches depend on each other, as a kernel starts long before it may go on. The time from one
kernel's wait to the next one's is what that kernel adds to the step. A stamp costs about 0.1 us.
"""

import itertools
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
STEPS = 64
FIRST = 16  # words before the stamps, also in the kernel; word 0 counts them


def main() -> int:
    sys.path[0] = str(ROOT)  # not this folder, whose names are common ones
    shape, form, lanes = (*sys.argv[1:], *("270m", "bf16", "1")[len(sys.argv) - 1 :])[:3]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # kernels hold the address that stamps go to
        _measure(shape, form, int(lanes))
    return 0


def _measure(shape: str, form: str, lanes: int) -> None:
    import torch
    import triton.language as tl
    from triton.language.extra import cuda

    from numem.kernels.cuda import language as nl

    torch.set_grad_enabled(False)
    device = torch.device("cuda")
    stamps = torch.zeros(1 << 20, dtype=torch.int64, device=device)
    nl.STAMPS = tl.constexpr(stamps.data_ptr())  # type: ignore[attr-defined]  # looked up by the kernel below

    @nl.jit
    def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
        if PDL:
            cuda.gdc_wait()
            if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
                to = (tl.full((), 0, tl.int64) + nl.STAMPS).to(tl.pointer_type(tl.int64))
                tl.store(to + 16 + tl.atomic_add(to, 1), cuda.globaltimer())

    nl.wait = wait  # before anything is compiled

    from benchmarks.common import Bench
    from benchmarks.models import Made

    bench = cast(Bench, SimpleNamespace(dry=False, device=device, size=lambda real, tiny: real))
    context = 512 if lanes == 1 else 2048
    made = Made.of(bench, shape, form, lanes=lanes, context=context + STEPS)
    made.fill()
    made.decode(context, STEPS)
    stamps.zero_()
    made.decode(context, STEPS)
    torch.cuda.synchronize()
    count = int(stamps[0])
    _print(f"{shape} {form}, {lanes} lanes", stamps[FIRST : FIRST + count].tolist(), _names(made))


def _names(made: Any) -> list[str]:
    """Of the launches of a step, in order."""
    from numem.kernels.cuda import segments

    names = []
    for each in made.decoder.program.launches:
        kind = type(each).__name__
        if kind == "Normed":
            if not segments.serves(each.matrix) or not each.turn.joins:
                names.append("norm")
            kind = f"product to {each.out}"
        elif kind == "Product":
            kind = f"product of {each.source}"
        names.append(kind.lower())
    return [*names, "head", "end"]


def _print(title: str, stamps: list[int], names: list[str]) -> None:
    each = len(names)
    if len(stamps) != STEPS * each:
        print(f"{title}: {len(stamps)} stamps, {each} launches are known of {len(stamps) / STEPS} a step")
        return
    spent = defaultdict(list)
    for at, (a, b) in enumerate(itertools.pairwise(stamps)):
        if at >= 8 * each:
            spent[names[at % each]].append((b - a) / 1e3)
    whole = [(stamps[at + each] - stamps[at]) / 1e3 for at in range(8 * each, len(stamps) - each, each)]
    print(f"{title}: {statistics.median(whole):.1f} us a step, stamps included")
    for name, us in spent.items():
        low, middle, high = statistics.quantiles(us, n=4)
        times = names.count(name)
        print(f"  {name:<22} x {times:<3} {middle:6.2f} us [{low:.2f}, {high:.2f}]  {times * middle:7.1f} us a step")


if __name__ == "__main__":
    sys.exit(main())
