"""Debug aids over page tensors: poison in pages that nobody holds, and seals over pages that are full.

free   ---taken (all poison?)--->   held   ---committed full (sealed)--->   read (seal unbroken?)
  ^                                  |                                        |
  +-----------freed (poisoned)-------+----------------------------------------+
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from numem.errors import IntegrityError
from numem.identity.digest import checksum


class Bytes(Protocol):
    """The bytes of all page tensors, page by page."""

    def fill(self, pages: Sequence[int]) -> None:
        """Every byte of these pages 0xFF, NaN in every float dtype."""
        ...

    def touched(self, page: int) -> bool:
        """Whether a filled page has other bytes now."""
        ...

    def digest(self, page: int) -> bytes:
        """What tells whether a page changed."""
        ...


class HostBytes:
    """Bytes of pages in host memory.

    Args:
        pools: tensors whose second axis is the physical page.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._raw = [pool.view(torch.int32 if pool.element_size() == 4 else torch.int16) for pool in pools]

    def fill(self, pages: Sequence[int]) -> None:
        index = torch.as_tensor(list(pages), dtype=torch.int64)
        for raw in self._raw:
            raw[:, index] = -1

    def touched(self, page: int) -> bool:
        return any(bool((raw[:, page] != -1).any()) for raw in self._raw)

    def digest(self, page: int) -> bytes:
        parts = torch.cat([raw[:, page].reshape(-1) for raw in self._raw])
        return checksum(parts.numpy())


class PageGuard:
    """Finds writes to pages that are not to be written. A pool tells it what happens to its pages.

    Args:
        contents: the bytes of the pages.
        pages: how many there are.
        poison: free pages are full of 0xFF bytes, and are looked at when they are taken.
        canary: full pages are hashed when they are committed, and compared when they are read.
    """

    def __init__(self, contents: Bytes, pages: int, *, poison: bool, canary: bool) -> None:
        self._contents = contents
        self._poison = poison
        self._canary = canary
        self._seals: dict[int, bytes] = {}
        if poison:
            contents.fill(range(pages))

    def taken(self, pages: Sequence[int]) -> None:
        """Free pages are about to be held.

        Raises:
            IntegrityError: one was written after it was freed; names it.
        """
        if self._poison:
            for page in pages:
                if self._contents.touched(page):
                    raise IntegrityError(
                        f"page {page}: written while it was free; whoever released it last still wrote to it"
                    )

    def freed(self, pages: Sequence[int]) -> None:
        """Nobody holds these pages any more."""
        for page in pages:
            self._seals.pop(page, None)
        if self._poison:
            self._contents.fill(pages)

    def filled(self, pages: Sequence[int]) -> None:
        """These pages are full and committed: nothing writes to them until they are freed or reopened."""
        if self._canary:
            for page in pages:
                self._seals[page] = self._contents.digest(page)

    def reopened(self, page: int) -> None:
        """A page's last rows are about to be written again by its only holder."""
        self._seals.pop(page, None)

    def verify(self, pages: Iterable[int]) -> None:
        """These pages are about to be read.

        Raises:
            IntegrityError: a sealed page's bytes changed; names it.
        """
        for page in pages:
            seal = self._seals.get(page)
            if seal is not None and seal != self._contents.digest(page):
                raise IntegrityError(f"page {page}: its bytes changed after it was committed; recompute its sequences")
