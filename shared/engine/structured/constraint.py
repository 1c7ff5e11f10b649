"""The grammar of one choice, and which tokens it may draw next."""

from __future__ import annotations

from collections.abc import Iterable

from .grammar import Grammar, GrammarError, Matcher


class Constraint:
    """Follows the outputs of one sequence. The grammar rules over everything else that restricts
    a draw: end tokens may be drawn where it may stop, and nowhere else.

    ``complete``: it allows no further token, and there is no end token to draw. ``failure`` is the
    reason why it could not be followed. Both are known before the draw is.
    """

    def __init__(self, grammar: Grammar, end_tokens: Iterable[int]) -> None:
        self.complete = False
        self.failure = ""
        self._grammar = grammar
        self._ends = tuple(end_tokens)
        self._matcher: Matcher | None = None
        self._taken = 0

    def take(self, outputs: list[int]) -> list[int]:
        """The outputs that ``next_mask`` has to move past; called in the thread of the sequence's
        owner."""
        new = outputs[self._taken :]
        self._taken = len(outputs)
        return new

    def next_mask(self, tokens: list[int]) -> bytes | None:
        """The mask of the draw behind ``tokens``; ``None`` if there is nothing to draw."""
        try:
            if self._matcher is None:
                self._matcher = self._grammar.matcher()
            self._matcher.advance(tokens)
            mask = self._matcher.mask()
        except GrammarError as error:
            self.failure = f"the output cannot follow its grammar: {error}"
            return None
        self._allow_ends(mask, self._matcher.accepting)
        self.complete = not any(mask)
        return None if self.complete else bytes(mask)

    def _allow_ends(self, mask: bytearray, allowed: bool) -> None:
        if allowed:
            for token in self._ends:
                mask[token >> 3] |= 1 << (token & 7)
