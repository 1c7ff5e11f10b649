"""Markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def first_of(text: str, markers: Iterable[str], at: int = 0) -> tuple[int, str] | None:
    """The position of the first marker from ``at`` on, and the marker."""
    found = [(place, marker) for marker in markers if (place := text.find(marker, at)) >= 0]
    return min(found) if found else None


def held_back(text: str, markers: Iterable[str]) -> int:
    """The length of the longest end of ``text`` with which a marker begins."""
    markers = tuple(markers)
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


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
