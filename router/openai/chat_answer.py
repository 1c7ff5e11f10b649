"""OpenAI's shapes of a chat completion, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.text.tokenizer import Tokenizer
from ..generation import Delta, Generation, Scored, Usage
from ..http.encoding import EncodedArray
from .answer import Answer, Whole, finite, placement_body, usage_body


class ChatLogprobs:
    """Logprobs of a choice: one entry a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._content = EncodedArray()

    def __len__(self) -> int:
        return len(self._content)

    def add(self, scored: Sequence[Scored]) -> None:
        self._content.extend(_token(item, self._tokenizer) for item in scored)

    def body(self) -> dict[str, Any]:
        return {"content": self._content, "refusal": None}


class ChatAnswer:
    """The words of one answer; ``created`` is its start in Unix seconds."""

    logprobs = ChatLogprobs

    def __init__(self, generation: Generation, created: int) -> None:
        self._generation = generation
        self._tokenizer = generation.model.tokenizer
        self._created = created

    def opening(self) -> list[dict[str, Any]]:
        """The role chunk of each choice, as soon as the request is admitted."""
        role = {"role": "assistant", "content": ""}
        chunks = [self._chunk([_choice(i, role)]) for i in range(self._generation.choices)]
        if self._generation.return_token_ids and chunks:
            chunks[0]["prompt_token_ids"] = self._generation.prompts[0].tokens.tolist()
        return chunks

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Text first, then the finish reason with an empty delta, as OpenAI has it."""
        chunks = []
        if delta.text or delta.scored or (delta.tokens and self._generation.return_token_ids):
            choice = _choice(delta.index, {"content": delta.text})
            if delta.scored:
                choice["logprobs"] = _logprobs(delta.scored, self._tokenizer)
            if self._generation.return_token_ids:
                choice["token_ids"] = list(delta.tokens)
            chunks.append(self._chunk([choice]))
        if delta.finish_reason is not None:
            choice = _choice(delta.index, {}, delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason
            chunks.append(self._chunk([choice]))
        return chunks

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk that ``include_usage`` asks for."""
        return self._chunk([]) | {"usage": usage_body(usage), "tandem": placement_body(usage)}

    def whole(self, answer: Answer) -> dict[str, Any]:
        body = self._head("chat.completion") | {
            "choices": [self._whole(i, choice) for i, choice in enumerate(answer.choices)],
            "usage": usage_body(answer.usage),
            "tandem": placement_body(answer.usage),
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
        if self._generation.return_token_ids:
            body["prompt_token_ids"] = self._generation.prompts[0].tokens
        if self._generation.prompt_logprobs is not None:
            body["prompt_logprobs"] = answer.prompts.get(0)
        return body

    def _whole(self, index: int, choice: Whole) -> dict[str, Any]:
        body = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if choice.logprobs is None else choice.logprobs.body(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": None,
        }
        if self._generation.return_token_ids:
            body["token_ids"] = choice.tokens
        return body

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk") | {"choices": choices}
        if self._generation.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": self._created,
            "model": self._generation.model.name,
        }


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _logprobs(scored: Sequence[Scored], tokenizer: Tokenizer) -> dict[str, Any]:
    return {"content": [_token(item, tokenizer) for item in scored], "refusal": None}


def _token(item: Scored, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = item.logprobs
    if logprobs is None:  # cannot be: only the first token of an echoed prompt has none
        return _entry(pb.TokenLogprob(token=item.token), tokenizer) | {"top_logprobs": []}
    top = [_entry(entry, tokenizer) for entry in logprobs.top]
    return _entry(logprobs.chosen, tokenizer) | {"top_logprobs": top}


def _entry(entry: pb.TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.texts.text_of(entry.token),
        "logprob": finite(entry.logprob),
        "bytes": list(tokenizer.texts.bytes_of(entry.token)),
    }
