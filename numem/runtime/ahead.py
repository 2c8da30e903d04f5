"""Decoding several steps on a device before the host reads a token: what a decoder offers for it.

    host      reserve k rows a lane | load                      | take tokens one by one | ...
    device                               | step | step | ...  | step | ...             |

A decoder that does this chooses tokens itself, by a rule of its own: every path must then choose by that rule, so that
what a request generates does not depend on how many steps were decoded at a time.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from numem.runtime.device.state import Step
from numem.runtime.sampling import Sampler, not_finite

if TYPE_CHECKING:
    from numem.runtime.engine import Engine
    from numem.runtime.paging.pages import PageStorage

# Milliseconds by which a token may be told late because others are decoded behind it first.
AHEAD_MS = 10.0
# Steps decoded at a time at most.
AHEAD_STEPS = 128


class Ahead(Protocol):
    """Decodes several steps over the pages of one storage."""

    def pieces(self, items: Sequence[Step], steps: int) -> Iterator[np.ndarray]:
        """Decode `steps` tokens of every lane; keys and values of positions [position, position + steps) are written.

        All steps are under way before the first tokens come, so that the device goes on while those are taken.

        Returns:
            int64 [some steps, lanes] in order, `steps` together: the tokens chosen; -1 where a lane's logits were not
            finite, and what follows in that lane means nothing.
        """
        ...


@runtime_checkable
class DeviceDecoder(Protocol):
    """A decoder (`numem.runtime.engine.Decoder`) that decodes ahead and chooses tokens by a rule of its own."""

    def ahead(self, storage: "PageStorage", limit: int) -> Ahead:
        """What decodes over these pages and chooses ids below `limit`."""
        ...

    def choose(
        self, samplers: Sequence[tuple[Sampler, int]], limit: int, storage: "PageStorage", rows: Sequence[int]
    ) -> list[int]:
        """Tokens below `limit` that (sampler, position) pairs choose from these rows of the logits of the last `forward`
        over these pages; -1 of logits that are not finite."""
        ...


def pick(engine: "Engine", logits: np.ndarray, position: int, sampler: Sampler) -> int:
    """Token chosen at `position` from the one row of logits that the engine's last call returned.

    Raises:
        ModelError: the largest logit is not finite.
    """
    if engine.chooser is None or not sampler.temperature:
        return sampler.choose(logits, position, engine.vocab)
    (token,) = engine.chooser.choose([(sampler, position)], engine.vocab, engine.storage, [0])
    if token < 0:
        raise not_finite(position)
    return token
