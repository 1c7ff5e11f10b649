"""The parts of responses that chat and text completions share: usage, placement, logprobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.errors import RequestError
from ...shared.text.tokenizer import Tokenizer
from ..errors import ApiError
from ..generation import ChoiceDelta, GenerationRequest
from ..http.encoding import EncodedArray
from ..node_streams.logprobs import alternatives
from ..usage import Usage
from .errors import error_body
from .request_fields import OpenAIRequest

# Stands for minus infinity, which JSON lacks; vLLM writes the same.
LOWEST_LOGPROB = -9999.0
LAST_DATA = "[DONE]"
END_OF_STREAM = b"data: %b\n\n" % LAST_DATA.encode()


class PromptLogprobsEncoder:
    """vLLM's ``prompt_logprobs``; the first token has none, so its entry is null."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._entries = EncodedArray([None])

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, items: Collection[pb.PositionLogprobs]) -> None:
        self._entries.extend(_ranked_tokens(position, self._tokenizer) for position in items)

    def body(self) -> EncodedArray:
        return self._entries


class ContinuousUsage:
    """The usage of each choice so far, for the chunks of ``continuous_usage_stats``."""

    def __init__(self, request: GenerationRequest) -> None:
        self._prompts = [len(prompt.tokens) for prompt in request.prompts]
        self._n = request.n
        self._completed = [0] * request.choices

    def add(self, delta: ChoiceDelta) -> None:
        self._completed[delta.index] += len(delta.tokens)

    def body(self, index: int) -> dict[str, int]:
        prompt, completion = self._prompts[index // self._n], self._completed[index]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def token_names(request: OpenAIRequest) -> Callable[[int], str]:
    """The names of tokens in logprobs: their texts, or their ids in vLLM's form."""
    return "token_id:{}".format if request.tokens_as_ids else request.model.tokenizer.texts.text_of


def usage_body(usage: Usage, *, with_reasoning: bool = False) -> dict[str, Any]:
    """OpenAI's usage object."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.all_cached_tokens},
    }
    if with_reasoning:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def placement_body(usage: Usage) -> dict[str, Any]:
    """The nodes that served the request: an extension beside OpenAI's fields."""
    return {
        "decode_nodes": usage.decode_nodes,
        "prefill_nodes": usage.prefill_nodes,
        "remote_tokens": usage.remote_tokens,
    }


def fingerprint_field(request: GenerationRequest) -> dict[str, str]:
    """OpenAI's ``system_fingerprint``. In streams it comes in the chunks with a finish reason or
    the usage, as in vLLM."""
    return {"system_fingerprint": request.model.system_fingerprint}


def metrics_body(request: OpenAIRequest, usage: Usage) -> dict[str, Any]:
    """vLLM's ``metrics`` of --enable-per-request-metrics, in milliseconds. ``mean_itl_ms`` is left
    out unless a choice has two tokens."""
    timings = usage.timings
    if not request.timed or timings is None:
        return {}
    metrics = {
        "time_to_first_token_ms": _milliseconds(timings.first_token),
        "generation_time_ms": _milliseconds(timings.generation),
        "queue_time_ms": _milliseconds(timings.queue),
        "tokens_per_second": round(usage.completion_tokens / max(timings.total, 1e-6), 3),
    }
    if timings.gap is not None:
        metrics["mean_itl_ms"] = _milliseconds(timings.gap)
    return {"metrics": metrics}


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def error_field(error: RequestError | None) -> dict[str, Any]:
    """The error of a choice that failed while others continued, as a field of the choice."""
    if error is None:
        return {}
    return error_body(ApiError(400, str(error), param=error.param, code=error.code))


def finite(logprob: float) -> float:
    """The logprob, or ``LOWEST_LOGPROB`` if JSON has no number for it."""
    return max(logprob, LOWEST_LOGPROB) if not math.isnan(logprob) else LOWEST_LOGPROB


def _ranked_tokens(position: pb.PositionLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    chosen, text_of = position.chosen, tokenizer.texts.text_of
    rows = [(chosen.token, chosen.logprob, chosen.rank)]
    rows += [(token, value, rank) for rank, (token, value) in enumerate(alternatives(position), 1)]
    return {
        str(token): {"logprob": finite(value), "rank": rank, "decoded_token": text_of(token)}
        for token, value, rank in rows
    }
