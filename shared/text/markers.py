"""Markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache


def first_of(text: str, markers: Iterable[str], at: int = 0) -> tuple[int, str] | None:
    """The position of the first marker from ``at`` on, and the marker."""
    first: tuple[int, str] | None = None
    for marker in markers:
        place = text.find(marker, at)
        if place >= 0 and (first is None or (place, marker) < first):
            first = place, marker
    return first


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest end of ``text`` with which a marker begins."""
    length = 0
    for beginning, longest in _beginnings(markers):
        at = text.find(beginning, max(0, len(text) - longest))
        while 0 <= at < len(text) - length:
            end = text[at:]
            if any(len(end) < len(marker) and marker.startswith(end) for marker in markers):
                length = len(end)
            at = text.find(beginning, at + 1)
    return length


@lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> list[tuple[str, int]]:
    """The first characters of markers, and how much of the longest of them a text may end in."""
    found: dict[str, int] = {}
    for marker in markers:
        found[marker[0]] = max(found.get(marker[0], 0), len(marker) - 1)
    return list(found.items())


class CallMarkers:
    """The markers with which calls begin, and their places in the text of one choice: a model that
    writes about a marker spells it in several tokens, while the one that begins a call is a token.
    Without ``tokens``, by their numbers, each is taken for one that begins a call."""

    def __init__(self, texts: Iterable[str], tokens: Mapping[int, str] | None = None) -> None:
        self._tokens = tokens
        self.texts = tuple(texts) if tokens is None else tuple(tokens.values())
        self._places: set[int] = set()

    def see(self, token: int, text: str, place: int) -> None:
        """Note a token and its text, which begins at ``place``."""
        if self._tokens and (marker := self._tokens.get(token)) and marker in text:
            self._places.add(place + text.rindex(marker))

    def begin_call(self, place: int) -> bool:
        """True if a call begins at this place of the text, where a marker is."""
        return self._tokens is None or place in self._places


NO_CALLS = CallMarkers(())
