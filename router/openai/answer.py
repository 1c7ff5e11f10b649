"""Items folded into one whole answer, and what both surfaces say about usage and logprobs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Protocol

from ...proto import tandem_pb2 as pb
from ...shared.text.tokenizer import Tokenizer
from ..generation import (
    Delta,
    Generation,
    Item,
    PromptScored,
    Restarted,
    Scored,
    Usage,
    new_tokens,
)
from ..http.encoding import EncodedArray
from ..http.held_bytes import Share

# JSON has no infinity; vLLM writes this.
LOWEST_LOGPROB = -9999.0


class Logprobs(Protocol):
    """The logprobs of one choice, in the shape of one surface, encoded as they come."""

    def add(self, scored: Sequence[Scored]) -> None:
        """Those of the next tokens."""

    def body(self) -> dict[str, Any]:
        """All of them."""

    def __len__(self) -> int:
        """Bytes."""


MakeLogprobs = Callable[[Tokenizer], Logprobs]


@dataclass(slots=True)
class Whole:
    """One choice, all of it."""

    logprobs: Logprobs | None = None
    text: StringIO = field(default_factory=StringIO)
    tokens: array[int] = field(default_factory=new_tokens)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta, *, keep_tokens: bool) -> int:
        """Returns by how many bytes it grew."""
        grown = len(delta.text) + 4 * len(delta.tokens)
        self.text.write(delta.text)
        if keep_tokens:
            self.tokens.extend(delta.tokens)
        if delta.scored and self.logprobs is not None:
            before = len(self.logprobs)
            self.logprobs.add(delta.scored)
            grown += len(self.logprobs) - before
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.finish_reason else self.stop_reason
        return grown


@dataclass(slots=True)
class Answer:
    """A finished request."""

    choices: list[Whole]
    prompts: dict[int, EncodedArray] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


class Folding:
    """Collects the items of one request. What it holds is counted in ``share``."""

    def __init__(self, generation: Generation, logprobs: MakeLogprobs, share: Share) -> None:
        self._generation = generation
        self._tokenizer = generation.model.tokenizer
        self._logprobs = logprobs
        self._share = share
        self._answer = Answer([self._whole() for _ in range(generation.choices)])

    def add(self, item: Item) -> None:
        """Add the next item of the request."""
        match item:
            case Delta():
                keep_tokens = self._generation.return_token_ids
                grown = self._answer.choices[item.index].add(item, keep_tokens=keep_tokens)
                self._share.take(grown)
            case PromptScored():
                self._add_prompt(item)
            case Restarted():
                self._restart(item.prompt)

    def answer(self, usage: Usage) -> Answer:
        """The whole answer, after the last item."""
        self._answer.usage = usage
        return self._answer

    def _whole(self) -> Whole:
        if self._generation.logprobs is None:
            return Whole()
        return Whole(self._logprobs(self._tokenizer))

    def _add_prompt(self, item: PromptScored) -> None:
        if self._generation.prompt_logprobs is None:
            return  # they are those of an echo, which has them in its deltas
        scored = self._answer.prompts.get(item.prompt)
        if scored is None:
            scored = self._answer.prompts[item.prompt] = EncodedArray([None])
        before = len(scored)
        scored.extend(_ranked(position, self._tokenizer) for position in item.positions)
        self._share.take(len(scored) - before)

    def _restart(self, prompt: int) -> None:
        self._answer.prompts.pop(prompt, None)
        first = prompt * self._generation.n
        for index in range(first, first + self._generation.n):
            self._answer.choices[index] = self._whole()


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def placement_body(usage: Usage) -> dict[str, Any]:
    """Where it ran: an extension, beside OpenAI's fields."""
    return {
        "decode_nodes": usage.decode_nodes,
        "prefill_nodes": usage.prefill_nodes,
        "remote_tokens": usage.remote_tokens,
    }


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if not math.isnan(logprob) else LOWEST_LOGPROB


def _ranked(position: pb.PositionLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """An entry of vLLM's ``prompt_logprobs``, of which the first, of no token, is null."""
    return {
        str(entry.token): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": tokenizer.texts.text_of(entry.token),
        }
        for entry in (position.chosen, *position.top)
    }
