"""Prepare `anchors` on a machine that has the models: cut their GGUF files into parts, write the tokens of the CPU.

python benchmarks/anchors_fetch.py parts DIR [KEY...]    parts of at most 50,000,000 bytes, <file>.part0 ...
python benchmarks/anchors_fetch.py golden [KEY...]       benchmarks/anchors/<key>.json
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = 50_000_000


def main() -> int:
    sys.path[0] = str(ROOT)  # not this folder, whose names are common ones
    from benchmarks.anchors import FILES, golden
    from numem.models.hub.registry import gguf_file, resolve
    from numem.models.weights.lockfile import sha256_file

    what, *rest = sys.argv[1:] or ["help"]
    if what == "parts" and rest:
        folder = Path(rest[0])
        folder.mkdir(parents=True, exist_ok=True)
        for key in rest[1:] or FILES:
            source = gguf_file(key)
            with source.open("rb") as whole:
                for number in range(-(-source.stat().st_size // PART)):
                    part = folder / f"{FILES[key]}.part{number}"
                    part.write_bytes(whole.read(PART))
                    print(part, part.stat().st_size)
        return 0
    if what == "golden":
        for key in rest or FILES:
            print(golden(resolve(key), key, sha256_file(gguf_file(key))))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
