"""Thinking budgets: reasoning that has spent its tokens is ended by its closing marker.

Its markers are found in the text of the outputs rather than among their tokens, since a model may
write them in other tokens than the tokenizer would. Those of calls are tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ...errors import RequestError
from .grammar import GrammarBackend

MAX_MARKER_CHARACTERS = 256
MAX_CALL_MARKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """At most ``tokens`` between the markers ``start`` and ``end`` of each output's reasoning.

    An empty ``start`` means that the prompt opens it. The tokens ``calls`` begin calls, and end it
    too. ``param`` is the budget's name in error messages.
    """

    tokens: int
    start: str = "<think>"
    end: str = "</think>"
    calls: tuple[str, ...] = ()
    param: str = "thinking"

    def check(self) -> None:
        """Raise ``RequestError`` for values that cannot be followed."""
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 0:
            raise self.error(
                f"it is {self.tokens!r:.64} tokens; it must be an integer of at least 0"
            )
        if not self.end:
            raise self.error("the reasoning has no closing marker")
        if max(map(len, (self.start, self.end, *self.calls))) > MAX_MARKER_CHARACTERS:
            raise self.error(f"its markers must have at most {MAX_MARKER_CHARACTERS} characters")
        if len(self.calls) > MAX_CALL_MARKERS:
            raise self.error(f"at most {MAX_CALL_MARKERS} markers of calls may end it")

    def error(self, reason: str) -> RequestError:
        return RequestError(f"Invalid '{self.param}': {reason}.", param=self.param)


class ThinkingRule:
    """A budget in the tokens of one model; ``closing`` is its closing marker."""

    def __init__(self, budget: ThinkingBudget, backend: GrammarBackend) -> None:
        self.tokens = budget.tokens
        self.start, self.end = budget.start.encode(), budget.end.encode()
        self.closing = backend.encode(budget.end)
        calls = [backend.encode(marker) for marker in budget.calls]
        self.calls = frozenset(tokens[0] for tokens in calls if len(tokens) == 1)
        self.text_of = backend.text_of
        self.mask_bytes = -(-backend.vocab_size // 8)
        if not all(token < backend.vocab_size for token in self.closing):
            raise budget.error("the model has no tokens for the end of its reasoning")


class ThinkingLimit:
    """The reasoning of one output.

    ``next_check`` is the lowest number of outputs with which the budget may be spent; it only
    grows. Another thread may read it.
    """

    def __init__(self, rule: ThinkingRule) -> None:
        self._rule = rule
        self._outputs = 0
        self._begun = None if rule.start else 0  # outputs when the reasoning began
        self._forced_at: int | None = None  # outputs when the closing marker was begun
        self._over = False
        self._tail = b""
        self.next_check = self._lowest()

    @property
    def outputs(self) -> int:
        """The number of outputs so far."""
        return self._outputs

    def advance(self, tokens: list[int]) -> None:
        """Move past ``tokens``."""
        for token in tokens:
            self._outputs += 1
            self._over = self._over or token in self._rule.calls
            self._read(self._rule.text_of(token))
        if self._forced_at is not None and self._place >= len(self._rule.closing):
            self._over = True  # the marker is there, whatever its text looks like
        self.next_check = self._lowest()

    def forced(self) -> int | None:
        """The token that must be drawn next, if there is one."""
        spent = self._begun is not None and self._outputs >= self._begun + self._rule.tokens
        if self._over or not spent:
            return None
        if self._forced_at is None:
            self._forced_at = self._outputs
        return self._rule.closing[self._place]

    def not_allowed(self) -> None:
        """Try again after the next token, as the grammar rejects the forced one here: the output
        may be in the middle of a character."""
        self._forced_at = None

    def mask(self, token: int) -> bytes:
        """A mask that allows one token only."""
        mask = bytearray(self._rule.mask_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)

    @property
    def _place(self) -> int:
        """The number of tokens of the closing marker that were forced."""
        return 0 if self._forced_at is None else self._outputs - self._forced_at

    def _lowest(self) -> int:
        if self._over:
            return sys.maxsize
        # A reasoning that has not begun does so with the next token at the earliest.
        begun = self._outputs + 1 if self._begun is None else self._begun
        return begun + self._rule.tokens

    def _read(self, text: bytes) -> None:
        """Look for the next marker."""
        if self._over:
            return
        marker = self._rule.start if self._begun is None else self._rule.end
        self._tail = self._tail[max(0, len(self._tail) - len(marker) + 1) :] + text
        _, found, rest = self._tail.partition(marker)
        if not found:
            return
        if self._begun is not None:
            self._over = True
            return
        self._begun, self._tail = self._outputs, b""
        self._read(rest)
