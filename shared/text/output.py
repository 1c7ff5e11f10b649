"""The text of one choice: detokenized, up to a stop string, then split by a parser.

The router and the Python API share it. A parser is the stage between text and response: it diverts
parts of the text, such as reasoning or a tool call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .detokenize import Detokenizer
from .markers import NO_CALLS, CallMarkers
from .stop import StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New output of one tool call, the ``index``-th of its choice. ``id`` and ``name`` come once,
    with the first delta of the call; ``arguments`` is a fragment of JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


# Not frozen: created for each token, and a frozen dataclass takes four times as long to create.
@dataclass(slots=True)
class TextDelta:
    """New text of a choice, in the order of the response: reasoning, content, calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


Deltas = Sequence[TextDelta]


def join_deltas(deltas: Deltas) -> list[TextDelta]:
    """Merge deltas as far as their order allows: a new one begins where text follows a call."""
    result: list[TextDelta] = []
    for group in _in_order(deltas):
        calls = tuple(call for delta in group for call in delta.calls)
        content = "".join([delta.content for delta in group])
        reasoning = "".join([delta.reasoning for delta in group])
        result.append(TextDelta(content, reasoning, _join_calls(calls)))
    return result


def _in_order(deltas: Deltas) -> Iterable[Deltas]:
    group: list[TextDelta] = []
    after_call = False
    for delta in deltas:
        if after_call and (delta.content or delta.reasoning):
            yield group
            group, after_call = [], False
        group.append(delta)
        after_call = after_call or bool(delta.calls)
    if group:
        yield group


def _join_calls(calls: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
    """One delta for each run of deltas of the same call."""
    result: list[CallDelta] = []
    for call in calls:
        if result and result[-1].index == call.index:
            last = result[-1]
            arguments = last.arguments + call.arguments
            result[-1] = CallDelta(call.index, last.id, last.name, arguments)
        else:
            result.append(call)
    return tuple(result)


class OutputParser(Protocol):
    """Splits the text of one choice. Text may arrive in any pieces, with the same result."""

    @property
    def reasoning(self) -> bool:
        """True while new text belongs to the reasoning."""

    def push(self, text: str) -> Deltas:
        """Add text; text that may be the beginning of a marker is held back."""

    def flush(self, ended_by: str = "") -> Deltas:
        """Return the text held back, at the end of the choice. ``ended_by`` is the text of the
        token that ended it, unless it was pushed."""


class PlainText:
    """The parser of models without a parser: all text is content."""

    reasoning = False

    def push(self, text: str) -> Deltas:
        return (TextDelta(text),)

    def flush(self, ended_by: str = "") -> Deltas:
        return ()


class OutputText:
    """Turns the tokens of one choice into text, until a stop string ends it. ``calls`` records the
    places of call markers.

    ``tokens`` and ``reasoning_tokens`` count the tokens pushed, ``characters`` their text,
    including text held back. ``stopped_by`` is the stop string that ended the choice."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] | StopStrings = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        parser: OutputParser | None = None,
        calls: CallMarkers = NO_CALLS,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._parser = parser or PlainText()
        self._plain = parser is None and self._stops.passes_all
        self._calls = calls
        self.tokens = 0
        self.reasoning_tokens = 0
        self.characters = 0

    @property
    def stopped_by(self) -> str | None:
        return self._stops.match

    def push(self, token: int) -> Deltas:
        """Add a token; return its new text, in order. Check ``stopped_by`` afterwards."""
        text = self._detokenizer.push(token)
        if self._plain:  # the same as below in half the time
            self.tokens += 1
            self.characters += len(text)
            return (TextDelta(text),)
        self._calls.note(token, text, self.characters)
        text = self._before_stop(text)
        self.tokens += 1
        self.reasoning_tokens += self._parser.reasoning
        return self._parse(text)

    def finish(self, stop_token: int | None = None) -> Deltas:
        """End the choice; return the text held back, unless it completes a stop string.

        ``stop_token`` ended the choice, and was not pushed. As in vLLM it counts, and its text is
        included if stop strings are.
        """
        text = ended_by = ""
        if stop_token is not None:
            self.tokens += 1
            if self._include_stop:
                text = self._detokenizer.push(stop_token)
        text = self._before_stop(text + self._detokenizer.flush())
        if self.stopped_by is None:
            text += self._stops.flush()
            if stop_token is not None and not self._include_stop:
                ended_by = self._detokenizer.push(stop_token)
        return [*self._parser.push(text), *self._parser.flush(ended_by)]

    def _before_stop(self, text: str) -> str:
        """The part of new and held-back text that cannot belong to a stop string."""
        self.characters += len(text)
        # As in vLLM, stop strings are ignored before min_tokens.
        return self._stops.push(text) if self.tokens + 1 > self._min_tokens else text

    def _parse(self, text: str) -> Deltas:
        deltas = self._parser.push(text)
        if self.stopped_by is None:
            return deltas
        return [*deltas, *self._parser.flush()]
