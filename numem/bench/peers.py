"""Other engines as processes of their own, spoken to in JSON lines, so that neither side's threads sit in the other.

The interpreter is this one, or the one that NUMEM_PEERS_PYTHON names: the peers need not share numem's environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from numem.errors import InputError


class PeerMissing(InputError):
    """A peer is not installed in the interpreter that was asked for it."""


class Peer:
    """A running peer.

    Args:
        script: name of a script beside this module.
        threads: threads that it may use.

    Raises:
        PeerMissing: its library cannot be imported.
    """

    def __init__(self, script: str, threads: int) -> None:
        python = os.environ.get("NUMEM_PEERS_PYTHON", sys.executable)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
        self.name = script.removesuffix(".py")
        self._process = subprocess.Popen(
            [python, str(Path(__file__).parent / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.version: str = self.ask("version", threads=threads)["version"]

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer.

        Raises:
            PeerMissing: at the first command.
            InputError: the peer failed, with its own words.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise InputError(f"{self.name} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise PeerMissing(f"{self.name}: {answer['missing']}; install numem[peers] or set NUMEM_PEERS_PYTHON")
        if "error" in answer:
            raise InputError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
