"""How a tier is configured: where it lies, how much it may hold, what leaves first, and when it is written."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from numem.errors import InputError
from numem.policy import DEFAULT, NAMES

WRITES = ("demand", "through", "selective", "back", "archive")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of a memory.

    Attributes:
        url: local directory or URL on a scheme Lance commits to; "host" for bounded memory of this process.
        capacity: bytes of pieces that the tier may hold on this node; None for no limit of its own.
        policy: which pieces leave first, a name in `numem.policy`.
        write: when a piece enters: "demand" by promotion alone, "through" also at publication, "selective" at the
            second touch by a reader. "back", on a tier of this node: publication ends here, the home tier follows.
            "archive": closed volumes of the home tier are copied there whole, when asked; any fsspec filesystem.
        options: Lance storage options of this tier; None for those of the memory.

    Raises:
        InputError: a capacity that is not a positive whole number, an unknown policy or way of writing.
    """

    url: str | os.PathLike[str]
    capacity: int | None = None
    policy: str = DEFAULT
    write: str = "demand"
    options: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity <= 0):
            raise InputError(
                f"tier at {self.url}: a capacity of {self.capacity!r} bytes; give a positive whole number or None"
            )
        if self.policy not in NAMES:
            raise InputError(f"tier at {self.url}: policy={self.policy!r}; use one of {', '.join(NAMES)}")
        if self.write not in WRITES:
            raise InputError(f"tier at {self.url}: write={self.write!r}; use one of {', '.join(WRITES)}")
