"""Measured costs between processes: one small JSON file per scope and device below a memory's local directory."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from numem.errors import InputError
from numem.identity.digest import framed_sha256
from numem.identity.fingerprint import Identity
from numem.policy.costs import Costs

if TYPE_CHECKING:
    from numem.store.memory import Memory


def costs_path(memory: "Memory", identity: Identity) -> Path:
    """Where the measurements of a scope on a device lie; a digest, so that no name becomes a path."""
    name = framed_sha256("numem/costs/v1", identity.scope, identity.device_class.encode()).hex()[:32]
    return memory.local / "costs" / f"{name}.json"


def load_costs(memory: "Memory", identity: Identity) -> Costs:
    """The last measurements of a scope; none where the file is missing, or damaged, which a warning record tells."""
    path = costs_path(memory, identity)
    try:
        return Costs.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Costs()
    except (OSError, InputError, ValueError, RecursionError) as error:
        if not memory.read_only:
            body = {"what": "measured costs are damaged and were begun anew", "path": str(path), "why": str(error)}
            memory.record("warning", identity.scope, body)
            # Gone, so that it is said once.
            path.unlink(missing_ok=True)
        return Costs()


def save_costs(memory: "Memory", identity: Identity, costs: Costs) -> bool:
    """Write the measurements down, whole or not at all; whether they were. They are no reason to fail."""
    if memory.read_only:
        return False
    path = costs_path(memory, identity)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(costs.to_json(), sort_keys=True), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        return False
    return True
