"""Thinking budgets: the closing marker is forced once the reasoning has used its tokens.

The markers of reasoning are looked for in the text of the outputs rather than among their tokens,
since a model may write them in other tokens than the tokenizer would. Markers of calls are tokens.
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

    An empty ``start`` means that the prompt opens it. ``calls`` are markers of tool calls, which
    end it too if they are single tokens. ``param`` is the budget's name in error messages.
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
    """A budget in the tokens of one model; ``closing`` are the tokens of its end."""

    def __init__(self, budget: ThinkingBudget, backend: GrammarBackend) -> None:
        self.tokens = budget.tokens
        self.start, self.end = budget.start.encode(), budget.end.encode()
        self.closing = backend.encode(budget.end)
        markers = [backend.encode(marker) for marker in budget.calls]
        self.call_tokens = frozenset(tokens[0] for tokens in markers if len(tokens) == 1)
        self.text_of = backend.text_of
        self.mask_bytes = -(-backend.vocab_size // 8)
        if not all(token < backend.vocab_size for token in self.closing):
            raise budget.error("the model has no tokens for the end of its reasoning")


class ThinkingLimit:
    """The reasoning of one output.

    ``next_check`` is the lowest number of outputs at which the budget may be used up; it only
    grows. Another thread may read it.
    """

    def __init__(self, rule: ThinkingRule) -> None:
        self._rule = rule
        self._outputs = 0
        self._start = None if rule.start else 0  # the number of outputs before the reasoning
        self._forced_at: int | None = None  # the number of outputs before the marker
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
            self._over = self._over or token in self._rule.call_tokens
            self._read(self._rule.text_of(token))
        if self._forced_at is not None and self._place >= len(self._rule.closing):
            self._over = True  # the marker is complete, whatever its text
        self.next_check = self._lowest()

    def forced(self) -> int | None:
        """The token that must be drawn next, if there is one."""
        is_used_up = self._start is not None and self._outputs >= self._start + self._rule.tokens
        if self._over or not is_used_up:
            return None
        if self._forced_at is None:
            self._forced_at = self._outputs
        return self._rule.closing[self._place]

    def reject_forced(self) -> None:
        """Force again after the next token, because the grammar rejects the token here: the output
        may be in the middle of a character."""
        self._forced_at = None

    def mask(self, token: int) -> bytes:
        """A mask that allows only one token."""
        mask = bytearray(self._rule.mask_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)

    @property
    def _place(self) -> int:
        """The number of forced tokens of the closing marker."""
        return 0 if self._forced_at is None else self._outputs - self._forced_at

    def _lowest(self) -> int:
        if self._over:
            return sys.maxsize
        # Reasoning that has not begun can begin after the next token at the earliest.
        start = self._outputs + 1 if self._start is None else self._start
        return start + self._rule.tokens

    def _read(self, text: bytes) -> None:
        """Look for the next marker."""
        if self._over:
            return
        marker = self._rule.start if self._start is None else self._rule.end
        self._tail = self._tail[max(0, len(self._tail) - len(marker) + 1) :] + text
        _, match, rest = self._tail.partition(marker)
        if not match:
            return
        if self._start is not None:
            self._over = True
            return
        self._start, self._tail = self._outputs, b""
        self._read(rest)
