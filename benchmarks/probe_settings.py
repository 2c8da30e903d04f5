"""How the settings of a program (columns, k, warps, stages) of products change its time on one GPU; they change no bit.

python benchmarks/probe_settings.py [head | chain | many]... [--forms bf16,q8,q4] [--rows 1,32]

One line a shape, the fastest setting first, with the one that the library takes marked. Matrices are passed through in
turn, more bytes than the cache holds.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
Config = tuple[int, ...]
HEADS = ((151_936, 1024), (262_144, 640), (128_256, 4096))
CHAINS = ((6144, 4096, None), (4096, 4096, None), (28_672, 4096, "silu"), (4096, 14_336, None))
MANY = ((4096, 1024), (6144, 1024), (1024, 2048), (1024, 3072), (1536, 640), (640, 2048))
CACHE = 2.2e8  # bytes, more than the second-level cache has
HEAD_CONFIGS: tuple[Config, ...] = tuple(
    (bn, 128, warps, stages) for bn, warps in ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)) for stages in (2, 3, 4)
)  # fmt: skip
CHAIN_CONFIGS: tuple[Config, ...] = (
    *((16, 128, warps, stages) for warps in (1, 2) for stages in (3, 4, 6, 8)),
    *((32, 128, warps, stages) for warps in (2, 4) for stages in (3, 4, 6)),
    *((64, 128, 4, stages) for stages in (2, 3, 4)),
    (16, 256, 2, 6),
    (32, 256, 2, 5),
)
MANY_CONFIGS: tuple[Config, ...] = (
    (128, 128, 128, 8, 3),
    (128, 128, 64, 8, 5),
    (256, 128, 64, 8, 4),
    (64, 256, 64, 8, 4),
    (64, 128, 64, 4, 3),
    *((64, columns, 128, 4, stages) for columns in (32, 64, 128) for stages in (2, 4, 6)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", choices=("head", "chain", "many"), default=["head", "chain"])
    parser.add_argument("--forms", default="bf16,q8,q4")
    parser.add_argument("--rows", default="1,32")
    args = parser.parse_args()
    sys.path[0] = str(ROOT)  # not this folder, whose names are common ones
    torch.set_grad_enabled(False)
    for form in args.forms.split(","):
        for rows in map(int, args.rows.split(",")):
            if "head" in args.what:
                heads(form, rows)
            if "chain" in args.what:
                chains(form, rows)
    if "many" in args.what:
        for rows in map(int, args.rows.split(",")):
            many(rows)
    return 0


def heads(form: str, rows: int) -> None:
    from benchmarks.shapes import Random
    from numem.kernels.cuda import head

    device = torch.device("cuda")
    for n, k in HEADS:
        matrix = Random(form, torch.bfloat16, device).matrix(n, k)
        h = torch.randn((rows, k), device=device).to(torch.bfloat16)
        out = torch.empty((rows, n), device=device)

        def call(config: Any, matrix: Any = matrix, h: Tensor = h, out: Tensor = out) -> None:
            head.logits_parts(h, matrix, out, len(out[0]), config=config, pdl=True)

        title = f"head {form} {n} x {k}, {rows} rows, {matrix.nbytes / 1e6:.0f} MB"
        _sweep(title, call, HEAD_CONFIGS, head.settings(matrix, rows))


def chains(form: str, rows: int) -> None:
    from benchmarks.shapes import Random
    from numem.kernels.cuda import chain

    device = torch.device("cuda")
    for n, k, act in CHAINS:
        made = Random(form, torch.bfloat16, device)
        matrices = [made.matrix(n, k)]
        matrices += [made.matrix(n, k) for _ in range(int(CACHE / matrices[0].nbytes))]
        h = torch.randn((rows, k), device=device).to(torch.bfloat16)
        width = n // 2 if act else n
        out = torch.empty((rows, width), device=device, dtype=torch.bfloat16)

        def call(
            config: Any, matrices: list[Any] = matrices, h: Tensor = h, out: Tensor = out, act: str | None = act
        ) -> None:
            for matrix in matrices:
                chain.few_rows(matrix, h, out, act=act, config=config, pdl=True)

        title = f"chain {form} {n} x {k}, {rows} rows, {len(matrices)} of {matrices[0].nbytes / 1e6:.1f} MB"
        lanes = 8 if rows <= 8 else 16 if rows <= 16 else 32
        _sweep(title, call, CHAIN_CONFIGS, chain.settings(matrices[0], width, lanes, act is not None), len(matrices))


def many(rows: int) -> None:
    from numem.kernels.cuda import segments

    device = torch.device("cuda")
    for n, k in MANY:
        weight = torch.randn((n, k), device=device).to(torch.bfloat16)
        h = torch.randn((rows, k), device=device).to(torch.bfloat16)
        out = torch.empty((rows, n), device=device, dtype=torch.bfloat16)

        def call(config: Any, weight: Tensor = weight, h: Tensor = h, out: Tensor = out) -> None:
            segments.many_rows(weight, None, h, out, config=config)

        _sweep(f"many {rows} x {k} x {n}", call, MANY_CONFIGS, segments.settings(weight, rows))


def _sweep(
    title: str, call: Callable[[Any], None], configs: Iterable[Config], taken: Config, products: int = 1
) -> None:
    """Print microseconds a product by setting."""
    from triton.testing import do_bench_cudagraph

    found, failed = [], []
    for config in dict.fromkeys((taken, *configs)):
        try:
            call(config)
            ms = do_bench_cudagraph(lambda c=config: call(c), rep=20, return_mode="median")
        except Exception as error:  # noqa: BLE001 - one that finds no room; the others go on
            failed.append(f"{config} {type(error).__name__}")
            continue
        found.append((ms * 1e3 / products, config))
    line = "; ".join(f"{us:.1f} {'*' if config == taken else ''}{config}" for us, config in sorted(found))
    print(f"{title}: {line}" + (f"; failed: {', '.join(failed)}" if failed else ""), flush=True)


if __name__ == "__main__":
    sys.exit(main())
