"""Measure on one GPU: `python benchmarks/run.py SECTION...`; README.md says what each section is.

Every section measures its own ceilings and its peer, prints its rows as they come and appends one JSON record to
<out>/<section>.jsonl. A row that fails is named, and the others go on.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("ceilings", "decode", "prefill", "attention", "restore", "publish", "exactness", "anchors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--commit", default="unknown", help="what was measured; kept in the record")
    parser.add_argument("--out", default=None, help="folder of the records (default: benchmarks/results)")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--shapes", default="270m,0.6b,8b", help="shapes of models, comma-separated")
    parser.add_argument("--formats", default="bf16,q8", help="formats of weights in `decode`")
    parser.add_argument("--lanes", default="1,32", help="lane counts in `decode`")
    parser.add_argument("--peer", default="graph", help="modes of the peer in `decode`, or none: see README")
    parser.add_argument("--dir", default="/tmp", help="folder on the disk that `restore` and `publish` use")
    parser.add_argument("--models", default=None, help="folder with the GGUF files of `anchors`, whole or in parts")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step in `decode`")
    parser.add_argument("--trace", action="store_true", help="print the traceback of a row that fails")
    args = parser.parse_args()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
    sys.path[0] = str(ROOT)  # not this folder, whose names are common ones

    import torch

    from benchmarks.ceilings import measure
    from benchmarks.common import Bench, release

    if not args.dry and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry tries the scripts on the CPU")
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    if args.dry:
        torch.set_num_threads(1)
    failed = False
    ceilings = None
    for name in args.sections:
        began = time.perf_counter()
        print(f"== {name}", flush=True)
        bench = Bench(name, args.dry, args)
        if ceilings is None:
            ceilings = bench.attempt("ceilings", lambda bench=bench: measure(bench))
        if ceilings is not None:
            bench.attempt(
                name,
                lambda bench=bench, c=ceilings: importlib.import_module(f"benchmarks.{bench.section}").run(bench, c),
            )
        bench.write(ceilings)
        release()
        failed |= bool(bench.failures)
        print(f"== {name}: {time.perf_counter() - began:.0f} s, {len(bench.failures)} failures", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
