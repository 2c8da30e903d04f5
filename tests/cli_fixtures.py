"""What a command printed, as the tests of the command line look at it."""

import json
from typing import Any

from typer.testing import Result


def output(result: Result, code: int = 0) -> Any:
    """The one JSON object of a command."""
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def error(result: Result, kind: str, code: int = 1) -> str:
    document = output(result, code)
    assert set(document) == {"error", "type"} and document["type"] == kind
    assert result.stderr == f"error: {document['error']}\n"
    return str(document["error"])
