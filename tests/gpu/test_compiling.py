"""Every kernel passes the compiler, where no GPU is there to say so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from numem.kernels import cuda

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_is_compiled(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the other tests compile them")
    sources = Path(next(iter(cuda.__path__))).glob("*.py")
    names = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiling"], cwd=ROOT, env=env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert names <= set(done.stdout.splitlines()[-1].split()), done.stdout[-500:]
