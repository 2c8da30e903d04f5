"""A tiny model, a table of prompts and runs of the job on both, shared by the tests of the Dagster side."""

import json
import random
import string
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_project.deployment import Deployment
from tests.model_fixtures import tiny_model

# Every passage and question of a table begins with it, so that a leak of text into an event is found by one search.
MARKER = "Zanzibar"


def model_directory(root: Path) -> Path:
    """A random model with one token per byte and room for 2,048 of them."""
    return tiny_model(root / "model", max_position_embeddings=2048, num_hidden_layers=2)


def passage(seed: int, length: int) -> str:
    """Text of exactly `length` bytes, without merges the tokenizer knows."""
    letters = random.Random(seed)
    words = ""
    while len(words) < length:
        words += "".join(letters.choices(string.ascii_uppercase, k=letters.randint(2, 8))) + "."
    return words[:length]


def table(path: Path, *, passages: int = 2, questions: int = 3, length: int = 560, seed: int = 0) -> Path:
    """A JSONL table of passages times questions, plain text, one token a byte; prefixes are `length` tokens and 9 or 10 more.

    No two questions begin alike, so nothing but the prefixes is shared.
    """
    rows = []
    for p in range(passages):
        body = passage(seed + p, length)
        rows += [
            {"id": f"p{p}-q{q}", "prompt": f"{seed + p}{body}{MARKER}{q:02d}{passage(100 + q, 20 + q)}"}
            for q in range(questions)
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def deployment(root: Path, model: Path) -> Deployment:
    return Deployment(memory=str(root / "memory"), model=str(model))


def materialisation(
    instance: dg.DagsterInstance, asset: str, partition: str, run_id: str | None = None
) -> dg.EventLogRecord:
    """The newest event of an asset in a partition (of a run)."""
    wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey(asset), asset_partitions=[partition])
    records = instance.fetch_materializations(wanted, limit=50).records
    return next(record for record in records if run_id in (None, record.run_id))


def metadata(record: dg.EventLogRecord) -> dict[str, Any]:
    """Metadata values of an event, by key."""
    assert record.asset_materialization is not None
    return {key: entry.value for key, entry in record.asset_materialization.metadata.items()}
