"""The tokens of kept routes as a tree of pages, so that the longest common prefix is found page by page.

    root -- [t0 .. t15] -- [t16 .. t31] -- [t32 .. t40]      a path is a sequence; its last page may be short
                       \\-- [t16 .. t20, u21 .. u31]         parts inside a page: 5 tokens of it are shared

The children of a page stand in order of their packed tokens. Packed tokens have a fixed width, so the child that shares
most tokens with a sequence is a neighbour of the place where the sequence would stand: no other child is looked at.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS, TOKEN_BYTES, common_tokens, pack_tokens


class _Page:
    """One page of a path. `some` is the id of a sequence through it: the latest one added, while it is there."""

    __slots__ = ("applied", "children", "ends", "order", "parent", "some")

    def __init__(self, applied: bytes, parent: "_Page | None", some: str) -> None:
        self.applied = applied
        self.parent = parent
        self.some = some
        self.ends: dict[str, None] = {}
        self.children: dict[bytes, _Page] = {}
        self.order: list[bytes] = []

    def ids(self) -> Iterator[str]:
        """Ids of all sequences through this page, `some` first (and once more)."""
        yield self.some
        pages = [self]
        while pages:
            page = pages.pop()
            yield from page.ends
            pages.extend(page.children.values())


class PageTree:
    """Sequences by id, each a path of pages.

    Args:
        page_tokens: tokens per page.
    """

    def __init__(self, page_tokens: int = PAGE_TOKENS) -> None:
        self._step = page_tokens * TOKEN_BYTES
        self._root = _Page(b"", None, "")
        self._last: dict[str, _Page] = {}

    def __len__(self) -> int:
        return len(self._last)

    def add(self, name: str, tokens: Sequence[int]) -> tuple[int, str]:
        """Add a sequence.

        Returns:
            Pages that no sequence here had, and the id of one that had the page before them ("" where none did).

        Raises:
            InputError: no tokens, or an id that is here already.
        """
        if name in self._last or not len(tokens):
            raise InputError(f"page tree: {name!r} is here already or has no tokens")
        applied = pack_tokens(tokens)
        page, fresh, before = self._root, 0, ""
        for at in range(0, len(applied), self._step):
            key = applied[at : at + self._step]
            child = page.children.get(key)
            if child is None:
                child = page.children[key] = _Page(key, page, name)
                insort(page.order, key)
                fresh += 1
            else:
                before = child.some
                child.some = name
            page = child
        page.ends[name] = None
        self._last[name] = page
        return fresh, before

    def remove(self, name: str) -> None:
        """Take a sequence out; the work is in its own pages alone."""
        page = self._last.pop(name)
        del page.ends[name]
        while page.parent is not None:
            if not page.ends and not page.children:
                del page.parent.children[page.applied]
                del page.parent.order[bisect_left(page.parent.order, page.applied)]
            elif page.some == name:
                page.some = next(iter(page.ends), "") or next(iter(page.children.values())).some
            page = page.parent

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, str]]:
        """(tokens in common, id), the longest first; an id may come again, with fewer tokens.

        The first is found in the time of the prompt's pages, however many sequences are here.
        """
        applied = pack_tokens(tokens)
        page, at, path = self._root, 0, []
        while at + self._step <= len(applied) and (child := page.children.get(applied[at : at + self._step])):
            path.append(child)
            page, at = child, at + self._step
        rest = applied[at : at + self._step]
        place = bisect_left(page.order, rest)
        near = [(common_tokens(key, rest), key) for key in page.order[max(0, place - 1) : place + 1]]
        for shared, key in sorted(near, reverse=True):
            if shared:
                yield from ((at // TOKEN_BYTES + shared, name) for name in page.children[key].ids())
        for depth in range(len(path), 0, -1):
            yield from ((depth * self._step // TOKEN_BYTES, name) for name in path[depth - 1].ids())
