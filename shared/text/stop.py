"""Stop strings, matched across token and chunk boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """An Aho-Corasick automaton of stop strings, built once for all choices of a request. The time
    per character does not depend on the number of strings.

    A state is the longest suffix of the text that is a prefix of a string; state 0 is empty.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.texts = tuple(filter(None, stops))
        self._following: dict[tuple[int, str], int] = {}
        self._fallback = [0]  # the longest proper suffix that is a state
        self.lengths = [0]  # of each state
        self._matches: list[str | None] = [None]  # the longest stop string that ends here
        for stop in self.texts:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return bool(self.texts)

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            following = self._following.get((state, character))
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fallback[state]

    def match_at(self, state: int) -> str | None:
        """The longest stop string that ends the text in a state, if any."""
        return self._matches[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._following.get((state, character))
            if following is None:
                following = self._following[state, character] = len(self.lengths)
                self.lengths.append(self.lengths[state] + 1)
                self._fallback.append(0)
                self._matches.append(None)
            state = following
        self._matches[state] = stop

    def _link(self) -> None:
        """Set the fallbacks, of shorter states first."""
        edges = sorted(self._following.items(), key=lambda edge: self.lengths[edge[1]])
        for (state, character), following in edges:
            if state:
                self._fallback[following] = self.advance(self._fallback[state], character)
            self._matches[following] = (
                self._matches[following] or self._matches[self._fallback[following]]
            )


class StopMatcher:
    """Passes text until a stop string ends, holding back only a possible prefix of one.

    The stop string that ends first wins, and among those that end together the longest, so the
    result does not depend on how the text is split into deltas. After a match, nothing passes.
    """

    def __init__(self, stops: Sequence[str] | StopStrings, *, include: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._state = 0
        self._include = include
        self._pending = ""
        self.match: str | None = None

    @property
    def passes_all(self) -> bool:
        """True if there are no stop strings."""
        return not self._stops

    def push(self, text: str) -> str:
        """Add generated text; return the part that may be shown. Check ``match`` afterwards."""
        stops = self._stops
        if not stops:
            return text
        if self.match is not None:
            return ""
        for position, character in enumerate(text):
            self._state = stops.advance(self._state, character)
            if (stop := stops.match_at(self._state)) is not None:
                return self._end(text[: position + 1], stop)
        pending = self._pending + text
        cut = len(pending) - stops.lengths[self._state]
        self._pending = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        pending, self._pending = self._pending, ""
        return pending

    def _end(self, text: str, stop: str) -> str:
        self.match = stop
        text_up_to_stop = self._pending + text
        self._pending = ""
        return (
            text_up_to_stop
            if self._include
            else text_up_to_stop[: len(text_up_to_stop) - len(stop)]
        )
