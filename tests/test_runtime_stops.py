"""Stop strings: held back while they may still come, found as in a search through the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numem.errors import InputError
from numem.runtime.stops import StopStrings


def feed(stops: StopStrings, pieces: list[str]) -> tuple[str, bool]:
    """Everything emitted, and whether a stop string ended it before the last piece was consumed."""
    out, stopped = "", False
    for piece in pieces:
        text, stopped = stops.push(piece)
        out += text
        if stopped:
            break
    return out + stops.finish(), stopped


def whole(stop: list[str], text: str) -> str:
    return text[: min((at for at in (text.find(s) for s in stop) if at >= 0), default=len(text))]


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab\n", max_size=5), max_size=8))
def test_pieces_give_what_the_whole_text_gives(stop: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    found, stopped = feed(StopStrings(stop), pieces)
    assert found == whole(stop, text)
    if stopped:
        assert found != text


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab", max_size=12))
def test_nothing_is_held_longer_than_it_may_become_a_stop_string(stop: list[str], text: str) -> None:
    """At every moment the emitted text is a prefix of the answer, and the rest begins a stop string."""
    stops, out = StopStrings(stop), ""
    for at, character in enumerate(text):
        piece, stopped = stops.push(character)
        out += piece
        assert whole(stop, text).startswith(out)
        if stopped:
            return
        held = text[len(out) : at + 1]
        assert held == "" or any(s.startswith(held) or held.startswith(s) or s in held for s in stop)
        assert len(held) < max(map(len, stop))


@pytest.mark.parametrize(
    ("stop", "pieces", "text", "stopped"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", True),
        (["END"], ["EEN", "D!"], "E", True),
        (["END"], ["E", "N"], "EN", False),
        (["b", "abc"], ["a", "b", "c"], "", True),
        (["b", "abc"], ["a", "b", "x"], "a", True),
        (["b", "abc"], ["a", "b"], "a", False),
        (["ab", "abc"], ["abc"], "", True),
        (["x", "y"], ["1y2x"], "1", True),
        ([], ["all", " of it"], "all of it", False),
    ],
)
def test_cases(stop: list[str], pieces: list[str], text: str, stopped: bool) -> None:
    assert feed(StopStrings(stop), pieces) == (text, stopped)


def test_after_the_stop_nothing_comes() -> None:
    stops = StopStrings(["."])
    assert stops.push("a.b") == ("a", True)
    assert stops.push("c") == ("", True)
    assert stops.finish() == ""


@pytest.mark.parametrize("stop", [[""], ["a", ""], "ab", [1]])
def test_strings_that_cannot_stop(stop: list[str]) -> None:
    with pytest.raises(InputError, match="stop"):
        StopStrings(stop)
