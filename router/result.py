"""The outputs of one request, collected for a response that is not streamed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Protocol, TypeVar

from ..proto import tandem_pb2 as pb
from ..shared.errors import RequestError
from ..shared.text.output import CallDelta
from .generation import (
    ChoiceDelta,
    GenerationRequest,
    Output,
    PromptEmbedded,
    PromptScores,
    ScoredToken,
    new_tokens,
)
from .http.memory_budget import MemoryShare
from .usage import Usage

T = TypeVar("T", contravariant=True)


class LogprobsEncoder(Protocol[T]):
    """Encodes logprobs in one API's format as they arrive: JSON takes a tenth of the memory of
    objects."""

    def add(self, items: Collection[T]) -> None:
        """Encode the logprobs of the next tokens."""

    def body(self) -> Any:
        """All logprobs so far, as a value for ``http.encoding.dump``."""

    def __len__(self) -> int:
        """Bytes of memory."""


ChoiceLogprobs = LogprobsEncoder[ScoredToken]
PromptLogprobs = LogprobsEncoder[pb.PositionLogprobs]


@dataclass(slots=True)
class ToolCallResult:
    """One tool call of a choice."""

    id: str
    name: str
    arguments: StringIO = field(default_factory=StringIO)


@dataclass(slots=True)
class ChoiceResult:
    """All output of one choice."""

    logprobs: ChoiceLogprobs | None = None
    text: StringIO = field(default_factory=StringIO)
    reasoning: StringIO = field(default_factory=StringIO)
    calls: list[ToolCallResult] = field(default_factory=list)
    tokens: array[int] = field(default_factory=new_tokens)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    scored: int = 0  # generated tokens with a logprob
    logprob: float = 0.0  # sum over the scored tokens

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.scored)

    def add(self, delta: ChoiceDelta, *, keep_tokens: bool) -> int:
        """Add more output. Returns the growth in bytes."""
        grown = len(delta.text) + len(delta.reasoning) + 4 * len(delta.tokens)
        self.text.write(delta.text)
        self.reasoning.write(delta.reasoning)
        for call in delta.calls:
            grown += self._add_call(call)
        if keep_tokens:
            self.tokens.extend(delta.tokens)
        if delta.tokens:  # not the echo of a prompt
            for item in delta.scored:
                self.scored += 1
                self.logprob += item.logprobs.chosen.logprob if item.logprobs else 0.0
        if delta.scored and self.logprobs is not None:
            before = len(self.logprobs)
            self.logprobs.add(delta.scored)
            grown += len(self.logprobs) - before
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.finish_reason else self.stop_reason
        self.error = delta.error or self.error
        if delta.finish_reason == "length":
            self._drop_empty_call()
        return grown

    def _drop_empty_call(self) -> None:
        """Drop a tool call that was cut off before its arguments, as vLLM does: clients would fail
        to parse empty ones."""
        if self.calls and not self.calls[-1].arguments.tell():
            self.calls.pop()

    def _add_call(self, call: CallDelta) -> int:
        if call.index == len(self.calls):
            self.calls.append(ToolCallResult(call.id, call.name))
        self.calls[call.index].arguments.write(call.arguments)
        return len(call.id) + len(call.name) + len(call.arguments)


@dataclass(slots=True)
class GenerationResult:
    """All output of a request. ``prompt_logprobs`` and ``vectors`` are by the prompt's number."""

    choices: list[ChoiceResult]
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


class ResultCollector:
    """Collects the outputs of one request; accounts for its bytes in ``memory``."""

    def __init__(
        self,
        request: GenerationRequest,
        choice_logprobs: Callable[[], ChoiceLogprobs | None],
        prompt_logprobs: Callable[[], PromptLogprobs | None],
        memory: MemoryShare,
    ) -> None:
        self._request = request
        self._prompt_logprobs = prompt_logprobs
        self._memory = memory
        self._result = GenerationResult(
            [ChoiceResult(choice_logprobs()) for _ in range(request.choices)]
        )

    def add(self, output: Output) -> None:
        """Add the next output of the request."""
        match output:
            case ChoiceDelta():
                choice = self._result.choices[output.index]
                grown = choice.add(output, keep_tokens=self._request.return_token_ids)
                self._memory.take(grown)
            case PromptScores():
                self._memory.take(self._add_scores(output))
            case PromptEmbedded():
                self._result.vectors[output.prompt] = output.values
                # Including its JSON, which has about 20 bytes for each float of 4.
                self._memory.take(6 * len(output.values))

    def result(self, usage: Usage) -> GenerationResult:
        """The whole result, after the last output."""
        self._result.usage = usage
        if self._request.best is not None:
            self._keep_best(self._request.best)
        return self._result

    def _keep_best(self, count: int) -> None:
        """Keep the choices of each prompt with the highest logprob per token, best first."""
        n, choices = self._request.n, self._result.choices
        ranked = [
            sorted(choices[first : first + n], key=lambda choice: -choice.mean_logprob)
            for first in range(0, len(choices), n)
        ]
        self._result.choices = [choice for group in ranked for choice in group[:count]]

    def _add_scores(self, scores: PromptScores) -> int:
        encoder = self._result.prompt_logprobs.get(scores.prompt)
        if encoder is None:
            encoder = self._prompt_logprobs()
            if encoder is None:
                return 0  # requested for the echo, whose deltas have them
            self._result.prompt_logprobs[scores.prompt] = encoder
        before = len(encoder)
        encoder.add(scores.positions)
        return len(encoder) - before
