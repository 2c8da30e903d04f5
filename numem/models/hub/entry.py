"""A model known by key, and how far numem vouches for it."""

import os
import re
from dataclasses import dataclass
from enum import IntEnum

from numem.errors import FetchError, InputError
from numem.models.hub.sources import Source

KINDS = ("lm", "embedding")

_KEY = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")


class Level(IntEnum):
    """How far a model has been validated; each level includes those before it."""

    RECOGNISED = 0
    RUNNABLE = 1
    ANCHORED = 2
    CONTINUATION_READY = 3

    @property
    def label(self) -> str:
        """The name that people read: "continuation-ready"."""
        return self.name.lower().replace("_", "-")

    @property
    def meaning(self) -> str:
        """What the tests have shown of a model of this level."""
        return _MEANINGS[self]


_MEANINGS = {
    Level.RECOGNISED: "its files are known; it is refused at load, by the feature that it needs",
    Level.RUNNABLE: "its family equals transformers on random weights of its shape; its own weights were not run here",
    Level.ANCHORED: "its own weights give recorded reference outputs",
    Level.CONTINUATION_READY: "anchored, and a restored continuation of its own weights is bit-equal to one never left",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A known model.

    Attributes:
        key: the name that users give.
        source: where its files come from.
        family: config.json's model_type.
        notes: one line for people: what these weights are.
        kind: "lm", for `load_lm`, or "embedding", for `load_embedder`.
        level: how far it has been validated.
        licence: of the weights, by its SPDX name where it has one.
        accept: environment variable that must be "1" before anything is fetched, for weights under terms of their own.
        terms: where these terms stand.
    """

    key: str
    source: Source
    family: str
    notes: str
    kind: str = "lm"
    level: Level = Level.RUNNABLE
    licence: str = "unknown"
    accept: str | None = None
    terms: str | None = None

    def __post_init__(self) -> None:
        # The key becomes part of file names.
        if not _KEY.fullmatch(self.key):
            raise InputError(f"model key {self.key!r} must match {_KEY.pattern}")
        if self.kind not in KINDS:
            raise InputError(f"model {self.key}: kind {self.kind!r} is none of {', '.join(KINDS)}")

    @property
    def accepted(self) -> bool:
        """Whether its terms, if it has any, were accepted in this environment."""
        return self.accept is None or os.environ.get(self.accept) == "1"

    def check_accepted(self) -> None:
        """Raise FetchError unless the terms were accepted."""
        if not self.accepted:
            raise FetchError(
                f"{self.key} is under the {self.licence} ({self.terms}) and is not fetched unasked; "
                f"read them and set {self.accept}=1 if you accept them"
            )
