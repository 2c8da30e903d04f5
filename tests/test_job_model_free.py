"""The durable path without a model: the published keys, each with a measured value."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numem import Memory
from numem.errors import IntegrityError
from numem.identity.chain import plan
from numem.job.model_free import identity, node_of, payload_of, run_model_free
from numem.runtime.restore.prefix import lookup

ROOT = Path(__file__).parent.parent
METRICS = {
    "cached-tokens": 512,
    "capture-accepted": 2,
    "capture-rejected": 0,
    "chunks-planned": 4,
    "chunks-reused": 2,
    "chunks-stored": 2,
    "full-hits": 1,
    "misses": 0,
    "partial-hits": 0,
    "prefix-lookups": 1,
    "requested-tokens": 512,
    "restored-bytes": 65536,
    "restored-chunks": 2,
}


def test_the_published_keys_and_values() -> None:
    """Seed systems, 1.15, first row."""
    result = run_model_free()
    assert result.pop("stored-bytes") > 65_536
    assert result == {
        "processed-tokens": 512,
        "chunk-size": 256,
        "stored-chunks": 2,
        "deduplicated-on-repeat": True,
        "catalog-matches": 2,
        "cached-tokens": 512,
        "mmap-payload": {"element-type": "float32", "element-count": 8192, "byte-order": "little-endian"},
        "cache-metrics": METRICS,
    }


def test_a_directory_keeps_the_memory_and_a_second_run_stores_nothing(tmp_path: Path) -> None:
    first, second = (run_model_free(tmp_path / "m") for _ in range(2))
    assert first["directory"] == second["directory"] == str(tmp_path / "m")
    assert first["cache-metrics"] == METRICS
    assert second["cache-metrics"]["chunks-stored"] == 0 and second["cache-metrics"]["chunks-reused"] == 4
    assert second["stored-bytes"] == first["stored-bytes"] and second["stored-chunks"] == 2
    with Memory(tmp_path / "m") as memory, lookup(memory, identity().scope, range(513)) as match:
        assert match.tokens == 512 and match.reason == "complete"
        assert memory.verify().ok


def test_values_are_exact_and_the_repeat_is_measured(tmp_path: Path) -> None:
    """A memory that holds other bytes under the same cause is not taken for a success."""
    first, _ = plan(identity().scope, range(513))
    payload = payload_of(first)
    assert payload.dtype == np.dtype("<f4") and payload.shape == (4, 256, 8)
    assert np.array_equal(payload * 8, np.round(payload * 8))
    wrong = payload + 1
    with Memory(tmp_path / "m") as memory:
        memory.register(identity())
        memory.publish(node_of(first, identity().scope, wrong), [wrong]).published.result(30)
    with pytest.raises(IntegrityError, match="not what was published"):
        run_model_free(tmp_path / "m")


def test_it_needs_neither_torch_nor_a_model() -> None:
    code = (
        "import sys, json; from numem.job.model_free import run_model_free; r = run_model_free();"
        "print(json.dumps([r['cached-tokens'], [m for m in ('torch', 'transformers', 'dagster') if m in sys.modules]]))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == [512, []]
