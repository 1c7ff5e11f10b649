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


def partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest suffix of ``text`` that is a proper prefix of a marker."""
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
    """The first characters of markers, each with the length of its longest proper prefix."""
    lengths: dict[str, int] = {}
    for marker in markers:
        lengths[marker[0]] = max(lengths.get(marker[0], 0), len(marker) - 1)
    return list(lengths.items())


class CallMarkers:
    """Markers that begin a tool call, and their places in the text of one choice. Where a marker is
    a token, it begins a call only as that token: a model that writes about it spells it in several
    others. Without ``tokens`` (texts by id), every occurrence begins a call."""

    def __init__(self, texts: Iterable[str], tokens: Mapping[int, str] | None = None) -> None:
        self._tokens = tokens
        self.texts = tuple(texts) if tokens is None else tuple(tokens.values())
        self._places: set[int] = set()

    def note(self, token: int, text: str, place: int) -> None:
        """Note a token whose text begins at ``place``."""
        if self._tokens and (marker := self._tokens.get(token)) and marker in text:
            self._places.add(place + text.rindex(marker))

    def begins_call(self, place: int) -> bool:
        """True if the marker at this place of the text begins a call."""
        return self._tokens is None or place in self._places


NO_CALLS = CallMarkers(())
