"""The text of one choice: detokenized, up to a stop string, then split by a parser.

The router and the Python API share it. A parser is the stage between text and response: it may
divert a part of the text, such as the reasoning before an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .detokenize import Detokenizer
from .stop import StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a choice, by its place in the response."""

    content: str = ""
    reasoning: str = ""


class OutputParser(Protocol):
    """Splits the text of one choice. Text may arrive in any pieces, with the same result."""

    @property
    def reasoning(self) -> bool:
        """True while new text belongs to the reasoning."""

    def push(self, text: str) -> TextDelta:
        """Add text; text that may be the beginning of a marker is held back."""

    def flush(self) -> TextDelta:
        """Return the text held back, at the end of the choice."""


class PlainText:
    """The parser of models without a parser: all text is content."""

    reasoning = False

    def push(self, text: str) -> TextDelta:
        return TextDelta(text)

    def flush(self) -> TextDelta:
        return TextDelta()


class OutputText:
    """Turns the tokens of one choice into text, until a stop string ends it.

    ``tokens`` and ``reasoning_tokens`` count the tokens pushed, ``characters`` their text, which
    may be held back. ``stopped_by`` is the stop string that ended the choice."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] | StopStrings = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        parser: OutputParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._parser = parser or PlainText()
        self.tokens = 0
        self.reasoning_tokens = 0
        self.characters = 0

    @property
    def stopped_by(self) -> str | None:
        return self._stops.matched

    def push(self, token: int) -> TextDelta:
        """Add a token; its new text. Check ``stopped_by`` afterwards."""
        text = self._before_stop(self._detokenizer.push(token))
        self.tokens += 1
        self.reasoning_tokens += self._parser.reasoning
        return self._parsed(text)

    def finish(self, stop_token: int | None = None) -> TextDelta:
        """End the choice; the text held back, unless it completes a stop string.

        ``stop_token`` ended the choice, and was not pushed. As in vLLM it counts, and its text is
        included if stop strings are.
        """
        text = ""
        if stop_token is not None:
            self.tokens += 1
            if self._include_stop:
                text = self._detokenizer.push(stop_token)
        text = self._before_stop(text + self._detokenizer.flush())
        if self.stopped_by is None:
            text += self._stops.flush()
        return self._parsed(text, last=True)

    def _before_stop(self, text: str) -> str:
        """The part of new text, and of held-back text, that cannot be part of a stop string."""
        self.characters += len(text)
        # As in vLLM, stop strings do not count before min_tokens.
        return self._stops.push(text) if self.tokens + 1 > self._min_tokens else text

    def _parsed(self, text: str, last: bool = False) -> TextDelta:
        delta = self._parser.push(text)
        if not last and self.stopped_by is None:
            return delta
        rest = self._parser.flush()
        return TextDelta(delta.content + rest.content, delta.reasoning + rest.reasoning)
