"""Text completions in OpenAI's shape, whole and as chunks of a stream."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ...proto import tandem_pb2 as pb
from ..generation import ChoiceDelta, ScoredToken
from ..http.encoding import EncodedArray, data_event, encode_numbers
from ..http.text_template import TextTemplates
from ..node_streams.logprobs import alternatives
from ..result import ChoiceResult, GenerationResult
from ..surface import ResponseFormatter
from ..usage import Usage
from .request_fields import OpenAIRequest
from .response_fields import (
    END_OF_STREAM,
    ContinuousUsage,
    PromptLogprobsEncoder,
    error_field,
    fingerprint_field,
    finite,
    metrics_body,
    placement_body,
    token_names,
    usage_body,
)


class CompletionLogprobsEncoder:
    """The logprobs of a choice: four arrays with an item for each token."""

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._arrays: dict[str, EncodedArray] = {
            name: EncodedArray() for name in _logprobs([], name_of)
        }

    def __len__(self) -> int:
        return sum(map(len, self._arrays.values()))

    def add(self, items: Collection[ScoredToken]) -> None:
        for name, values in _logprobs(items, self._name_of).items():
            self._arrays[name].extend(values)

    def body(self) -> dict[str, Any]:
        return dict(self._arrays)


class CompletionFormatter(ResponseFormatter):
    """Formats one response; ``created`` is its Unix time."""

    def __init__(self, request: OpenAIRequest, created: int) -> None:
        self._request = request
        self._name_of = token_names(request)
        self._usage = ContinuousUsage(request) if request.continuous_usage else None
        self._created = created
        self._opened: set[int] = set()
        self._texts = TextTemplates(self._text_event)
        # Whether text events carry further fields.
        self._varied = request.continuous_usage or request.return_token_ids

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if delta.text and not (delta.scored or delta.finish_reason or self._varied):
            return self._texts.fill(delta.index, delta.text)
        if self._usage:
            self._usage.add(delta)
        has_tokens = self._request.return_token_ids and delta.tokens
        if not (delta.text or delta.scored or delta.finish_reason or has_tokens):
            return b""
        choice = _choice(delta.index, delta.text)
        choice["finish_reason"] = delta.finish_reason
        if delta.scored:
            choice["logprobs"] = _logprobs(delta.scored, self._name_of)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
            choice |= error_field(delta.error)
        is_first = delta.index not in self._opened
        self._opened.add(delta.index)
        if self._request.return_token_ids:
            if is_first:
                choice["prompt_token_ids"] = self._prompt(delta.index)
            choice["token_ids"] = list(delta.tokens)
        return data_event(self._chunk([choice]))

    def _text_event(self, index: int, text: str) -> bytes:
        return data_event(self._chunk([_choice(index, text)]))

    def closing(self, usage: Usage) -> bytes:
        """The usage chunk that ``include_usage`` requests."""
        if not self._request.include_usage:
            return b""
        extra = {"usage": usage_body(usage), "tandem": placement_body(usage)}
        extra |= fingerprint_field(self._request) | metrics_body(self._request, usage)
        return data_event(self._chunk([]) | extra)

    def end_of_stream(self) -> bytes:
        return END_OF_STREAM

    def choice_logprobs(self) -> CompletionLogprobsEncoder | None:
        if self._request.logprobs is None:
            return None
        return CompletionLogprobsEncoder(self._name_of)

    def prompt_logprobs(self) -> PromptLogprobsEncoder | None:
        if self._request.prompt_logprobs is None:
            return None
        return PromptLogprobsEncoder(self._request.model.tokenizer)

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        prompts = self._request.prompts if self._request.return_token_ids else ()
        prompt_ids = [encode_numbers(prompt.tokens) for prompt in prompts]
        choices = [
            self._whole(i, choice, result, prompt_ids) for i, choice in enumerate(result.choices)
        ]
        body = self._head() | {
            "choices": choices,
            **fingerprint_field(self._request),
            "usage": usage_body(result.usage),
            "tandem": placement_body(result.usage),
        }
        return body | metrics_body(self._request, result.usage)

    def _whole(
        self,
        index: int,
        choice: ChoiceResult,
        result: GenerationResult,
        prompt_ids: list[EncodedArray],
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "logprobs": None if choice.logprobs is None else choice.logprobs.body(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_token_ids": None,
            "token_ids": None,
            "prompt_logprobs": None,
            **error_field(choice.error),
        }
        number = index // self._request.returned
        if self._request.return_token_ids:
            body["prompt_token_ids"] = prompt_ids[number]
            body["token_ids"] = choice.tokens
        if number in result.prompt_logprobs:
            body["prompt_logprobs"] = result.prompt_logprobs[number].body()
        return body

    def _prompt(self, index: int) -> array[int]:
        return self._request.prompts[index // self._request.returned].tokens

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head() | {"choices": choices}
        if choices and choices[0]["finish_reason"] is not None:
            chunk |= fingerprint_field(self._request)
        if self._usage and choices:
            chunk["usage"] = self._usage.body(choices[0]["index"])
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model.name,
        }


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _logprobs(items: Iterable[ScoredToken], name_of: Callable[[int], str]) -> dict[str, list[Any]]:
    scored = list(items)
    return {
        "tokens": [name_of(item.token) for item in scored],
        "token_logprobs": [
            item.logprobs and finite(item.logprobs.chosen.logprob) for item in scored
        ],
        "top_logprobs": [item.logprobs and _top(item.logprobs, name_of) for item in scored],
        "text_offset": [item.offset for item in scored],
    }


def _top(logprobs: pb.PositionLogprobs, name_of: Callable[[int], str]) -> dict[str, float]:
    """The chosen token first, as in vLLM, then the alternatives; it may be one more than
    requested."""
    entries = [(logprobs.chosen.token, logprobs.chosen.logprob), *alternatives(logprobs)]
    return {name_of(token): finite(value) for token, value in entries}
