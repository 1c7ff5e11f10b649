"""OpenAI's shapes of a text completion, whole and in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.text.tokenizer import Tokenizer
from ..generation import Delta, Generation, Scored, Usage
from ..http.encoding import EncodedArray
from .answer import Answer, Whole, finite, placement_body, usage_body


class CompletionLogprobs:
    """Logprobs of a choice: four arrays as long as its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._arrays: dict[str, EncodedArray] = {
            name: EncodedArray() for name in _logprobs([], tokenizer)
        }

    def __len__(self) -> int:
        return sum(map(len, self._arrays.values()))

    def add(self, scored: Sequence[Scored]) -> None:
        for name, values in _logprobs(scored, self._tokenizer).items():
            self._arrays[name].extend(values)

    def body(self) -> dict[str, Any]:
        return dict(self._arrays)


class CompletionAnswer:
    """The words of one answer; ``created`` is its start in Unix seconds."""

    logprobs = CompletionLogprobs

    def __init__(self, generation: Generation, created: int) -> None:
        self._generation = generation
        self._tokenizer = generation.model.tokenizer
        self._created = created
        self._opened: set[int] = set()

    def opening(self) -> list[dict[str, Any]]:
        """Text completions have no role chunk."""
        return []

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        asks_tokens = self._generation.return_token_ids and delta.tokens
        if not (delta.text or delta.scored or delta.finish_reason or asks_tokens):
            return []
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": _logprobs(delta.scored, self._tokenizer) if delta.scored else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._generation.return_token_ids:
            if delta.index not in self._opened:
                choice["prompt_token_ids"] = self._prompt(delta.index).tolist()
            choice["token_ids"] = list(delta.tokens)
        self._opened.add(delta.index)
        return [self._chunk([choice])]

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk that ``include_usage`` asks for."""
        return self._chunk([]) | {"usage": usage_body(usage), "tandem": placement_body(usage)}

    def whole(self, answer: Answer) -> dict[str, Any]:
        choices = [self._whole(i, choice, answer) for i, choice in enumerate(answer.choices)]
        return self._head() | {
            "choices": choices,
            "usage": usage_body(answer.usage),
            "tandem": placement_body(answer.usage),
        }

    def _whole(self, index: int, choice: Whole, answer: Answer) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "logprobs": None if choice.logprobs is None else choice.logprobs.body(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_token_ids": None,
            "token_ids": None,
            "prompt_logprobs": None,
        }
        if self._generation.return_token_ids:
            body["prompt_token_ids"] = self._prompt(index)
            body["token_ids"] = choice.tokens
        if self._generation.prompt_logprobs is not None:
            body["prompt_logprobs"] = answer.prompts.get(index // self._generation.n)
        return body

    def _prompt(self, index: int) -> array[int]:
        return self._generation.prompts[index // self._generation.n].tokens

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head() | {"choices": choices}
        if self._generation.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._generation.model.name,
        }


def _logprobs(scored: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, list[Any]]:
    return {
        "tokens": [tokenizer.texts.text_of(item.token) for item in scored],
        "token_logprobs": [
            item.logprobs and finite(item.logprobs.chosen.logprob) for item in scored
        ],
        "top_logprobs": [item.logprobs and _top(item.logprobs, tokenizer) for item in scored],
        "text_offset": [item.offset for item in scored],
    }


def _top(logprobs: pb.PositionLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The chosen token is always among them, so there may be one more than asked for."""
    entries = (*logprobs.top, logprobs.chosen)
    return {tokenizer.texts.text_of(entry.token): finite(entry.logprob) for entry in entries}
