"""numem: durable, forkable numerical memory.

Everything public is reached from here and imported on first use, so that `import numem` stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numem.lineage.decisions import DecisionLog
    from numem.models.conversation import Conversation
    from numem.models.embedding.embedder import Embedder, load_embedder
    from numem.models.lm import LM, load_lm
    from numem.runtime.beam import beam_search
    from numem.runtime.front import Runtime
    from numem.runtime.lanes.scheduler import Scheduler
    from numem.runtime.request import Finish, Outcome, Request, Token
    from numem.runtime.sampling import Sampler
    from numem.store.config import TierSpec
    from numem.store.memory import Memory

__version__ = "0.1.0"

_HOMES = {
    "Conversation": "numem.models.conversation",
    "DecisionLog": "numem.lineage.decisions",
    "Embedder": "numem.models.embedding.embedder",
    "Finish": "numem.runtime.request",
    "LM": "numem.models.lm",
    "Memory": "numem.store.memory",
    "Outcome": "numem.runtime.request",
    "Request": "numem.runtime.request",
    "Runtime": "numem.runtime.front",
    "Sampler": "numem.runtime.sampling",
    "Scheduler": "numem.runtime.lanes.scheduler",
    "TierSpec": "numem.store.config",
    "Token": "numem.runtime.request",
    "beam_search": "numem.runtime.beam",
    "load_embedder": "numem.models.embedding.embedder",
    "load_lm": "numem.models.lm",
}

__all__ = [
    "LM",
    "Conversation",
    "DecisionLog",
    "Embedder",
    "Finish",
    "Memory",
    "Outcome",
    "Request",
    "Runtime",
    "Sampler",
    "Scheduler",
    "TierSpec",
    "Token",
    "__version__",
    "beam_search",
    "load_embedder",
    "load_lm",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'numem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
