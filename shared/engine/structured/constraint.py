"""The rules that one choice follows, and the tokens that it may draw next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .grammar import Grammar, GrammarError, Matcher
from .thinking_budget import ThinkingLimit, ThinkingRule


@dataclass(frozen=True, slots=True)
class OutputRules:
    """The compiled rules of a request, which each choice follows by itself."""

    grammar: Grammar | None = None
    thinking: ThinkingRule | None = None

    def constraint(self, end_tokens: Iterable[int]) -> Constraint | None:
        """The constraint of one choice; ``None`` without rules."""
        if self.grammar is None and self.thinking is None:
            return None
        limit = None if self.thinking is None else ThinkingLimit(self.thinking)
        return Constraint(self.grammar, end_tokens, limit)


class Constraint:
    """Follows the outputs of one sequence.

    The grammar overrides all other restrictions of a draw: end tokens are allowed exactly where it
    may stop. Once the thinking budget is used up, its closing marker is forced as soon as the
    grammar allows it.

    ``complete``: no further token is allowed, and there is no end token to draw. ``failure`` is the
    reason why the grammar could not be followed; ``unfollowable`` is true if that is the grammar's
    fault, not this node's. All three are set before the draw.
    """

    def __init__(
        self,
        grammar: Grammar | None,
        end_tokens: Iterable[int],
        thinking: ThinkingLimit | None = None,
    ) -> None:
        self.complete = False
        self.failure = ""
        self.unfollowable = False
        self._grammar = grammar
        self._thinking = thinking
        self._ends = tuple(end_tokens)
        self._matcher: Matcher | None = None
        self._num_passed = 0
        self._last_check = -1  # the number of outputs at the last check of the budget

    def restricts(self, place: int) -> bool:
        """True if the draw of the output at ``place`` may need a mask."""
        if self._grammar is not None:
            return True
        return self._thinking is not None and place >= self._thinking.next_check

    def take(self, outputs: list[int]) -> list[int]:
        """The new outputs, for ``next_mask``. Called in the thread of the sequence's owner."""
        new = outputs[self._num_passed :]
        self._num_passed = len(outputs)
        return new

    def next_mask(self, tokens: list[int]) -> bytes | None:
        """The mask of the draw after ``tokens``; ``None`` if any token may be drawn, or if the draw
        will be discarded."""
        if self._thinking is not None:
            tokens = self._advance_thinking(self._thinking, tokens)
        mask = self._rule_mask(tokens)
        if self._thinking is None or self.complete or self.failure:
            return mask
        self._last_check = self._thinking.outputs
        return _force(mask, self._thinking)

    def _advance_thinking(self, thinking: ThinkingLimit, tokens: list[int]) -> list[int]:
        """Move the budget past ``tokens``. Returns the rest for the grammar to move past.

        A resumed sequence has many tokens at once. The next token of the closing marker depends on
        where the marker began, so the budget is checked again at each place where it may have been.
        """
        first = 0
        for i, token in enumerate(tokens):
            if thinking.next_check <= thinking.outputs != self._last_check:
                _force(self._rule_mask(tokens[first:i]), thinking)
                first = i
            thinking.advance([token])
        return tokens[first:]

    def _rule_mask(self, tokens: list[int]) -> bytes | None:
        """The grammar's mask, if there is a grammar."""
        return None if self._grammar is None else self._grammar_mask(self._grammar, tokens)

    def _grammar_mask(self, grammar: Grammar, tokens: list[int]) -> bytes | None:
        try:
            if self._matcher is None:
                self._matcher = grammar.matcher()
            self._matcher.advance(tokens)
            mask = self._matcher.mask()
            if not self._matcher.accepting and not any(mask):
                raise GrammarError("no token continues it")
        except GrammarError as error:
            self.failure = f"the output cannot follow its grammar: {error}"
            self.unfollowable = True
            return None
        self._allow_ends(mask, self._matcher.accepting)
        self.complete = not any(mask)
        return None if self.complete else bytes(mask)

    def _allow_ends(self, mask: bytearray, allowed: bool) -> None:
        if allowed:
            for token in self._ends:
                mask[token >> 3] |= 1 << (token & 7)


def _force(mask: bytes | None, thinking: ThinkingLimit) -> bytes | None:
    """Replace the mask if a token is forced, unless ``mask`` forbids that token."""
    token = thinking.forced()
    if token is None:
        return mask
    if mask is None or mask[token >> 3] >> (token & 7) & 1:
        return thinking.mask(token)
    thinking.reject_forced()
    return mask
