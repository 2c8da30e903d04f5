"""numem: durable, forkable numerical memory.

Everything public is reached from here and imported on first use, so that `import numem` stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numem.models.lm import LM, load_lm
    from numem.store.config import TierSpec
    from numem.store.memory import Memory

__version__ = "0.1.0"

_HOMES = {
    "LM": "numem.models.lm",
    "Memory": "numem.store.memory",
    "TierSpec": "numem.store.config",
    "load_lm": "numem.models.lm",
}

__all__ = ["LM", "Memory", "TierSpec", "__version__", "load_lm"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'numem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
