"""Stop strings, matched across token and chunk boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The automaton of Aho and Corasick for some stop strings: built once for all choices of a
    request. It takes the same time for each character, however many strings there are.

    A state is the longest end of the text with which a string begins; the first is the empty one.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.texts = tuple(filter(None, stops))
        self._following: dict[tuple[int, str], int] = {}
        self._fallback = [0]  # the state of the longest proper end that is a state too
        self.lengths = [0]  # of each state
        self._ended: list[str | None] = [None]  # the longest string that ends in the state
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

    def ended(self, state: int) -> str | None:
        """The longest string with which the text ends in a state."""
        return self._ended[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._following.get((state, character))
            if following is None:
                following = self._following[state, character] = len(self.lengths)
                self.lengths.append(self.lengths[state] + 1)
                self._fallback.append(0)
                self._ended.append(None)
            state = following
        self._ended[state] = stop

    def _link(self) -> None:
        """Set the fallbacks, those of shorter states first."""
        edges = sorted(self._following.items(), key=lambda edge: self.lengths[edge[1]])
        for (state, character), following in edges:
            if state:
                self._fallback[following] = self.advance(self._fallback[state], character)
            self._ended[following] = (
                self._ended[following] or self._ended[self._fallback[following]]
            )


class StopMatcher:
    """Passes text until a stop string ends, holding back only a possible beginning of one.

    The stop string that ends first wins, and among those that end together the longest, so the
    result does not depend on how the text is split into deltas. After a match, nothing passes.
    """

    def __init__(self, stops: Sequence[str] | StopStrings, *, include: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._state = 0
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def passes_all(self) -> bool:
        """True if there are no stop strings."""
        return not self._stops

    def push(self, text: str) -> str:
        """Add generated text; return the part that may be shown. Check ``matched`` afterwards."""
        stops = self._stops
        if not stops:
            return text
        if self.matched is not None:
            return ""
        for position, character in enumerate(text):
            self._state = stops.advance(self._state, character)
            if (ended := stops.ended(self._state)) is not None:
                return self._end(text[: position + 1], ended)
        pending = self._held + text
        cut = len(pending) - stops.lengths[self._state]
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Return the text held back, at the end of the generation."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        shown = self._held + text
        self._held = ""
        return shown if self._include else shown[: len(shown) - len(stop)]
