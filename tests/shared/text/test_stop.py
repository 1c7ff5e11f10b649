"""Stop strings against a plain search of the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.text.stop import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that ends first, and of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_the_result_does_not_depend_on_the_cuts(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    output = "".join(matcher.push(piece) for piece in cut(text, places))
    if matcher.match is None:
        output += matcher.flush()
    assert (output, matcher.match) == expected(text, stops, include)


@given(LETTERS, STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    output = ""
    for i, character in enumerate(text):
        output += matcher.push(character)
        if matcher.match is not None:
            return
        tail = text[len(output) : i + 1]
        assert output + tail == text[: i + 1]
        prefixes = [text[: i + 1][start:] for start in range(i + 1)]
        longest = max(
            (len(p) for p in prefixes if any(s.startswith(p) and s != p for s in stops)),
            default=0,
        )
        assert len(tail) == longest


@pytest.mark.parametrize("include", [False, True])
def test_nothing_passes_after_a_match(include: bool) -> None:
    matcher = StopMatcher(["stop"], include=include)
    assert matcher.push("a st") == "a "
    assert matcher.push("op more") == ("stop" if include else "")
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
    assert matcher.match == "stop"
