"""The runtime, the models and the kernels work where neither Dagster nor Lance is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_fixtures import tiny_model

ROOT = Path(__file__).parents[1]

REFUSING = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

sys.meta_path.insert(0, Refuse())
"""
ABSENT = (
    "dagster",
    "dagster_webserver",
    "lance",
    "lancedb",
    "duckdb",
    "obstore",
    "s3fs",
    "matplotlib",
    "pandas",
    "gguf",
)

EVERY_MODULE = """
import importlib, pkgutil
import numem.kernels, numem.models, numem.runtime
for package in (numem.kernels, numem.models, numem.runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        name = module.name
        gpu = name.startswith(("numem.kernels.cuda", "numem.models.device_", "numem.runtime.device"))
        if "._native" not in name and not name.startswith("numem.models.gguf") and (triton or not gpu):
            importlib.import_module(name)
print("imported")
"""

SERVE = """
import numem
from numem.runtime.request import Finish, Request
from numem.runtime.sampling import Sampler

lm = numem.load_lm(sys.argv[1], device="auto", quantise="q8")
alone = lm.generate_ids([5, 6, 7, 8], 6, ignore_eos=True)
requests = [Request(str(i), (5, 6, 7, 8 + i), 6, sampler=Sampler(0.5 * i, 0, 1.0, i)) for i in range(4)]
with lm.runtime(lanes=2, tokens=64) as runtime:
    outcomes = [runtime.run(request)[0] for request in requests]
assert all(outcome.finish is Finish.LENGTH for outcome in outcomes), outcomes
assert outcomes[0].generated == alone, (outcomes[0].generated, alone)
assert lm.generate_text("hello", 4) is not None
print("served")
"""


def run(code: str, *args: str, absent: tuple[str, ...] = ABSENT) -> str:
    program = REFUSING.format(names=set(absent)) + code
    done = subprocess.run(
        [sys.executable, "-c", program, *args], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("triton", [False, True])
def test_every_module_of_the_resident_plane_imports(triton: bool) -> None:
    """What runs on a GPU imports Triton, and only that does."""
    if triton and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    absent = ABSENT if triton else (*ABSENT, "triton")
    assert run(f"triton = {triton}\n{EVERY_MODULE}", absent=absent) == "imported"


def test_a_model_is_loaded_and_served(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    assert run(SERVE, str(model), absent=(*ABSENT, "triton")) == "served"
