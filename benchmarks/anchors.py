"""Greedy tokens of real models on the GPU against those of the CPU, kept in benchmarks/anchors/*.json.

CPU and GPU sum in different orders, so their logits differ by rounding. Where the tokens part, the first difference is
shown with the CPU's own gap between the two tokens, beside how far the logits of the two devices are apart there, and how far
those of the CPU in bfloat16 are from its own in float32: what rounding does by itself.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Bench, Ceilings, Stat, release, wall

ANCHORS = Path(__file__).parent / "anchors"
NEW = 64
KEPT = 8  # logits of each step that are kept, the largest
DTYPES = ("bfloat16", "float32")  # of the CPU; a GPU runs the first
FILES = {
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m": "gemma-3-270m-q4_k_m.gguf",
}
PROMPTS = (
    "The lighthouse keeper wrote in her log every evening. On the last page she",
    "Water boils at a lower temperature on a mountain than at sea level because",
    "def mean(values):\n    ",
)


def run(bench: Bench, ceilings: Ceilings) -> None:
    """Every model whose GGUF file (whole or in parts) lies in --models."""
    bench.warm.append("weights resident; each prompt alone, through the engine")
    folder = None if bench.args.models is None else Path(bench.args.models)
    for key, file in FILES.items():
        golden = ANCHORS / f"{key}.json"
        there = folder is None or any(folder.glob(f"{file}*"))
        if not golden.is_file() or not there:
            print(f"{key}: no file of it in {folder}")
            continue
        known = json.loads(golden.read_text(encoding="utf-8"))
        directory = bench.attempt(f"import {key}", lambda k=key, w=known: imported(folder, k, w["sha256"]))
        if directory is None:
            continue
        bench.attempt(key, lambda d=directory, k=key, w=known: _compare(bench, d, k, w))
        release()


def imported(folder: Path | None, key: str, sha256: str) -> Path:
    """The model's directory, made from its GGUF file, which is put together from its parts where it came in parts."""
    from numem.models.gguf.importer import import_gguf

    if folder is None:
        raise FileNotFoundError("--models names no folder; see benchmarks/README.md")
    file = folder / FILES[key]
    parts = sorted(folder.glob(f"{FILES[key]}.part*"))
    if not file.is_file() and parts:
        with file.open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
    with file.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file} has sha256 {found[:16]}, not {sha256[:16]}: a part is missing or another version")
    directory = folder / key
    return directory if directory.is_dir() else import_gguf(file, directory)


def greedy(lm: Any, prompt: str) -> list[dict[str, Any]]:
    """`NEW` greedy steps: the token, and the largest logits with their ids."""
    steps = []
    with lm.session(pages=64).start(lm.tokenizer.encode(prompt)) as continuation:
        for _ in range(NEW):
            token = continuation.step()
            logits = np.asarray(continuation.logits, dtype=np.float32)
            top = np.argsort(-logits, kind="stable")[:KEPT]
            steps.append({"token": int(token), "ids": top.tolist(), "logits": [float(f"{v:.7g}") for v in logits[top]]})
    return steps


def golden(directory: str | Path, key: str, sha256: str) -> Path:
    """Write the tokens of the CPU; returns the file."""
    from numem import load_lm

    out: dict[str, Any] = {"model": key, "file": FILES[key], "sha256": sha256, "prompts": PROMPTS, "dtypes": {}}
    for dtype in DTYPES:
        lm = load_lm(directory, device="cpu", dtype=dtype, max_position=512)
        out["dtypes"][dtype] = [greedy(lm, prompt) for prompt in PROMPTS]
    file = ANCHORS / f"{key}.json"
    file.write_text(json.dumps(out, separators=(",", ":")) + "\n", encoding="utf-8")
    return file


def _compare(bench: Bench, directory: Path, key: str, known: dict[str, Any]) -> None:
    from numem import load_lm

    rounded, exact = (known["dtypes"][dtype] for dtype in DTYPES)
    lm = load_lm(directory, device="cpu" if bench.dry else "cuda", dtype=DTYPES[0], max_position=512)
    for prompt, theirs, truth in zip(known["prompts"], rounded, exact, strict=True):
        ours = greedy(lm, prompt)
        name = f"{key} {DTYPES[0]} {prompt[:18]!r}"
        first = {"first_logits_apart": _apart(ours[0], theirs[0]), "first_cpu_rounding": _apart(theirs[0], truth[0])}
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a["token"] != b["token"]), None)
        if at is None:
            bench.add(name, equal=NEW, **first)
            continue
        mine, cpu = ours[at], theirs[at]
        logits = dict(zip(cpu["ids"], cpu["logits"], strict=True))
        together = all(a["token"] == b["token"] for a, b in zip(theirs[:at], truth[:at], strict=True))
        bench.add(
            name, equal=at, **first, cpu_token=cpu["token"], gpu_token=mine["token"],
            cpu_gap=logits[cpu["token"]] - logits.get(mine["token"], float("nan")),
            gpu_gap=mine["logits"][0] - mine["logits"][1], logits_apart_there=_apart(mine, cpu),
            cpu_rounding_there=_apart(cpu, truth[at]) if together else float("nan"),
        )  # fmt: skip
    _rate(bench, lm, key, known["prompts"][0])


def _rate(bench: Bench, lm: Any, key: str, prompt: str) -> None:
    """Tokens a second of the library's own call, prompt and first use of pages included."""
    tokens, new = lm.tokenizer.encode(prompt), bench.size(256, 4)
    stat = Stat.of(wall(lambda: lm.generate_ids(tokens, new, ignore_eos=True), bench.size(7, 1), warm=bench.size(2, 0)))
    bench.add(f"{key}, {new} tokens by generate_ids", ms=stat.median / 1e3, tokens_s=stat.rate(new * 1e6))


def _apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of the logits that both kept."""
    known = dict(zip(b["ids"], b["logits"], strict=True))
    return max((abs(x - known[i]) for i, x in zip(a["ids"], a["logits"], strict=True) if i in known), default=0.0)
