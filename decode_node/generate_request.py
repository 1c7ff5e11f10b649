"""Sequences from a ``pb.GenerateRequest``. All of it is checked: a node does not trust routers."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..proto import tandem_pb2 as pb
from ..shared.config.sampling_fields import NUMBERS
from ..shared.engine.request import build_sequences, pooling_sequence
from ..shared.engine.sampling_params import SamplingParams, check_params
from ..shared.engine.sequence import Sequence
from ..shared.engine.start import NodeEngine
from ..shared.engine.structured.params import StructuredOutputs
from ..shared.engine.structured.thinking_budget import ThinkingBudget
from ..shared.errors import RequestError
from .embedding import pooling_work


async def admitted_sequences(request: pb.GenerateRequest, engine: NodeEngine) -> list[Sequence]:
    """The n choices of a request, or the only sequence of a prompt to embed.

    Raises ``RequestError``, ``OverloadedError`` or ``UnavailableError`` if it cannot run here."""
    if not request.deadline_seconds >= 0:  # also rejects NaN
        raise RequestError(
            f"deadline_seconds is {request.deadline_seconds}; it must not be negative"
        )
    if request.HasField("embed"):
        return [_pooling(request, engine)]
    engine.check_generates()
    params = sampling_params(request.sampling)
    prompt = list(request.prompt)
    resume = _resumed(request, params)
    admit = partial(
        engine.core.admit, len(prompt), params.max_tokens, goes_first=resume is not None
    )
    admit()  # before compiling a grammar
    sequences = build_sequences(
        engine.core,
        prompt,
        params,
        priority=request.priority,
        salt=request.cache_salt,
        vocab_size=engine.spec.vocab_size,
        rules=await engine.grammars.rules(params.structured_outputs, params.thinking),
        eos_token_ids=engine.spec.eos_token_ids,
        resume=resume,
    )
    admit()
    return sequences


def _pooling(request: pb.GenerateRequest, engine: NodeEngine) -> Sequence:
    engine.core.admit(len(request.prompt), 0)
    return pooling_sequence(
        engine.core,
        list(request.prompt),
        pooling_work(request, engine),
        vocab_size=engine.spec.vocab_size,
        priority=request.priority,
        salt=request.cache_salt,
    )


def _resumed(request: pb.GenerateRequest, params: SamplingParams) -> dict[int, list[int]] | None:
    """The tokens so far of the choices to continue; ``None`` for a new request. Raises
    ``RequestError``."""
    if not request.resume:
        return None
    resumed = {choice.index: list(choice.tokens) for choice in request.resume}
    if len(resumed) < len(request.resume) or max(resumed) >= params.n:
        indices = [choice.index for choice in request.resume]
        raise RequestError(
            f"resume has the choices {indices}; each must be below n ({params.n}) and unique"
        )
    if (longest := max(map(len, resumed.values()))) >= params.max_tokens:
        raise RequestError(
            f"resume has a choice of {longest} tokens, but max_tokens is {params.max_tokens}"
        )
    if params.prompt_logprobs is not None and longest:
        raise RequestError("prompt_logprobs come before the tokens that resume has")
    return resumed


def sampling_params(sampling: pb.Sampling) -> SamplingParams:
    """Raises ``RequestError`` for values out of range. Floats that proto3 omits mean "off"."""

    def optional(name: str) -> int | None:
        return getattr(sampling, name) if sampling.HasField(name) else None

    params = SamplingParams(
        **_numbers(sampling),
        seed=optional("seed"),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
        logprob_token_ids=tuple(sampling.logprob_token_ids),
        stop_token_ids=tuple(sampling.stop_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n or 1,
        logprobs=optional("logprobs"),
        prompt_logprobs=optional("prompt_logprobs"),
        structured_outputs=_structured_outputs(sampling),
        thinking=_thinking(sampling),
    )
    check_params(params)
    return params


def _numbers(sampling: pb.Sampling) -> dict[str, Any]:
    """The numeric parameters; an absent one that must not be 0 gets its default."""
    values = ((name, number, getattr(sampling, name)) for name, number in NUMBERS.items())
    return {
        name: number.default if number.above and not value else value
        for name, number, value in values
    }


def _structured_outputs(sampling: pb.Sampling) -> StructuredOutputs | None:
    """The constraint on the outputs. A kind that only a newer router knows reads as no constraint,
    which ``check_params`` rejects."""
    if not sampling.HasField("structured_outputs"):
        return None
    outputs = sampling.structured_outputs
    kind = outputs.WhichOneof("constraint")
    value = {} if kind is None else {kind: getattr(outputs, kind)}
    if kind == "choice":
        value = {kind: tuple(outputs.choice.texts)}
    return StructuredOutputs(
        **value,
        whitespace=not outputs.compact,
        reasoning_start=outputs.reasoning_start,
        reasoning_end=outputs.reasoning_end,
        param=outputs.param or "structured_outputs",
    )


def _thinking(sampling: pb.Sampling) -> ThinkingBudget | None:
    if not sampling.HasField("thinking"):
        return None
    thinking = sampling.thinking
    return ThinkingBudget(
        tokens=thinking.tokens,
        start=thinking.start,
        end=thinking.end,
        calls=tuple(thinking.calls),
        param=thinking.param or "thinking_token_budget",
    )
