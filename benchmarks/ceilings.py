"""The machine's own limits: copies on the device and to the host, a matrix product, and the gap between two launches."""

import torch
import triton.language as tl

from benchmarks.common import Bench, Ceilings, Stat, times
from numem.kernels.cuda import language as nl

CHAIN = 200  # kernels of the graph that measures the gap


@nl.jit
def empty_kernel(x, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    nl.let_next_start(PDL)
    nl.wait(PDL)
    tl.store(x, tl.load(x) + 1)


def run(bench: Bench, ceilings: Ceilings) -> None:
    """Copies of several sizes beside the ceilings that every section measures."""
    bench.warm.append("buffers resident on the device or pinned on the host; each size is copied 20 times in a row")
    device = bench.device
    whole = bench.size(256 << 20, 1 << 16)
    host = torch.empty(whole, dtype=torch.uint8, pin_memory=not bench.dry)
    there = torch.empty(whole, dtype=torch.uint8, device=device)
    for size in (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20):
        if size > whole:
            continue
        count = min(64, whole // size)

        def pieces(size: int = size, count: int = count, down: bool = False) -> None:
            for i in range(count):
                here, far = host[i * size : (i + 1) * size], there[i * size : (i + 1) * size]
                here.copy_(far, non_blocking=True) if down else far.copy_(here, non_blocking=True)

        up = Stat.of(times(pieces, 20))
        down = Stat.of(times(lambda pieces=pieces: pieces(down=True), 20))
        bench.add(
            f"copies of {size >> 10} KiB, {count} in a row",
            h2d_gbs=up.rate(size * count / 1e3), d2h_gbs=down.rate(size * count / 1e3),
        )  # fmt: skip
    for rows in (1, 16, 128, 4096):
        a = torch.randn((rows, bench.size(8192, 64)), device=device).to(_half(bench))
        b = torch.randn((bench.size(16384, 64), bench.size(8192, 64)), device=device).to(_half(bench))
        stat = Stat.of(times(lambda a=a, b=b: torch.mm(a, b.t()), 20))
        bench.add(
            f"cuBLAS product {rows} x 8192 x 16384", us=stat, gbs=stat.rate(b.nbytes / 1e3),
            tflops=stat.rate(2 * a.numel() * b.shape[0] / 1e6),
        )  # fmt: skip


def measure(bench: Bench) -> Ceilings:
    """Measure the ceilings, in about three seconds."""
    device = bench.device
    size = bench.size(1 << 30, 1 << 16)
    a = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    copy = Stat.of(times(lambda: b.copy_(a), 15))
    floats = a.view(torch.int32).float()[: size // 4]
    out = torch.empty((), device=device)
    read = Stat.of(times(lambda: torch.sum(floats, 0, out=out), 15))
    piece = bench.size(256 << 20, 1 << 16)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=not bench.dry)
    host.fill_(7)
    h2d = Stat.of(times(lambda: a[:piece].copy_(host, non_blocking=True), 8))
    d2h = Stat.of(times(lambda: host.copy_(a[:piece], non_blocking=True), 8))
    n = bench.size(8192, 64)
    x, y = (torch.randn((n, n), device=device).to(_half(bench)) for _ in range(2))
    matmul = Stat.of(times(lambda: torch.mm(x, y), 15))
    found = Ceilings(
        copy=copy.rate(2 * size / 1e3),
        read=read.rate(size / 1e3),
        h2d=h2d.rate(piece / 1e3),
        d2h=d2h.rate(piece / 1e3),
        matmul=matmul.rate(2 * n**3 / 1e6),
        gap=gap(bench, pdl=False),
        gap_pdl=gap(bench, pdl=True),
    )
    bench.add(
        "ceilings", copy_gbs=found.copy, read_gbs=found.read, h2d_gbs=found.h2d, d2h_gbs=found.d2h,
        matmul_tflops=found.matmul, gap_us=found.gap, gap_pdl_us=found.gap_pdl,
    )  # fmt: skip
    return found


def gap(bench: Bench, *, pdl: bool, programs: int = 132, warps: int = 4) -> float:
    """Microseconds a kernel of a chain that does nothing."""
    x = torch.zeros(1, device=bench.device)
    chain = bench.size(CHAIN, 2)

    def launch() -> None:
        for _ in range(chain):
            empty_kernel[(bench.size(programs, 1),)](x, num_warps=warps, **nl.launch(pdl))

    return Stat.of(times(graphed(bench, launch), 15)).median / chain


def graphed(bench: Bench, call):  # type: ignore[no-untyped-def]
    """`call` as a CUDA graph; itself on the CPU."""
    if bench.dry:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _half(bench: Bench) -> torch.dtype:
    return torch.float32 if bench.dry else torch.bfloat16
