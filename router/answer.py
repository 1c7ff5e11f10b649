"""Items folded into one whole answer, and what both surfaces say about usage and logprobs."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ..proto import tandem_pb2 as pb
from ..shared.text.tokenizer import Tokenizer
from .generation import Delta, Done, Generation, Item, PromptScored, Restarted, Scored, Usage

# JSON has no infinity; vLLM writes this.
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class Whole:
    """One choice, all of it."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.scored += delta.scored
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.finish_reason else self.stop_reason


@dataclass(slots=True)
class Answer:
    """A finished request."""

    choices: list[Whole]
    prompts: dict[int, list[pb.PositionLogprobs]] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


async def fold(items: AsyncIterator[Item], generation: Generation) -> Answer:
    """Wait for everything."""
    answer = Answer([Whole() for _ in range(generation.choices)])
    async for item in items:
        match item:
            case Delta():
                answer.choices[item.index].add(item)
            case PromptScored():
                answer.prompts[item.prompt] = item.positions
            case Restarted():
                first = item.prompt * generation.n
                for index in range(first, first + generation.n):
                    answer.choices[index] = Whole()
            case Done():
                answer.usage = item.usage
    return answer


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


def prompt_logprobs_body(
    positions: list[pb.PositionLogprobs], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: one entry a prompt token, null for the first."""
    return [None, *(_ranked(position, tokenizer) for position in positions)]


def _ranked(position: pb.PositionLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        str(entry.token): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": tokenizer.texts.text_of(entry.token),
        }
        for entry in (position.chosen, *position.top)
    }
