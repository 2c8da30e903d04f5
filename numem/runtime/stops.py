"""Stop strings: text that ends an output, found while it is still being written.

text     ...the answer is 4 | \n\nUs       emitted at once | held: may still become "\n\nUser:"
"""

from collections.abc import Sequence

from numem.errors import InputError


class StopStrings:
    """Cuts a growing text before the first stop string in it.

    The first is the one that starts first, so that the result is that of a search through the whole text, however the
    text was cut into pieces. Where one stop string lies within the beginning of another ("b" and "abc"), the text
    after it decides, and `push` waits for that.

    Args:
        stop: the strings; with none of them, everything passes.

    Raises:
        InputError: an empty stop string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or any(not isinstance(s, str) or not s for s in stop):
            raise InputError(f"stop: {stop!r} is not a list of strings of at least one character")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is now certain to come before any stop string, and whether one ends it here."""
        if self._stopped:
            return "", True
        self._held += text
        match, open_end = self._match(), self._open_end()
        self._stopped = match is not None and match <= open_end
        cut = open_end if match is None else min(match, open_end)
        out, self._held = self._held[:cut], self._held[cut:]
        return out, self._stopped

    def finish(self) -> str:
        """What was held back, up to a stop string; the text ends here."""
        held = "" if self._stopped else self._held[: self._match()]
        self._held, self._stopped = "", True
        return held

    def _match(self) -> int | None:
        """Where the first whole stop string starts in what is held."""
        return min((at for at in map(self._held.find, self._stop) if at >= 0), default=None)

    def _open_end(self) -> int:
        """Where the longest end that a stop string begins with starts."""
        n = len(self._held)
        for at in range(max(0, n - self._longest + 1), n):
            if any(s.startswith(self._held[at:]) for s in self._stop):
                return at
        return n
