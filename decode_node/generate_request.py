"""Sequences from a ``pb.GenerateRequest``, checked: a node does not trust its routers."""

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
    """The n choices of a request that can run here, or the only sequence of a prompt to embed.
    Raises ``RequestError``, ``OverloadedError`` or ``UnavailableError``."""
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
    admit()  # before the work that a grammar is
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
    """The choices to be continued, with their tokens so far; ``None`` if all begin here. Raises
    ``RequestError``."""
    if not request.resume:
        return None
    resumed = {choice.index: list(choice.tokens) for choice in request.resume}
    if len(resumed) < len(request.resume) or max(resumed) >= params.n:
        indices = [choice.index for choice in request.resume]
        raise RequestError(
            f"resume has the choices {indices}; each must be below n ({params.n}) and stand once"
        )
    if (longest := max(map(len, resumed.values()))) >= params.max_tokens:
        raise RequestError(
            f"resume has a choice of {longest} tokens, but max_tokens is {params.max_tokens}"
        )
    if params.prompt_logprobs is not None and longest:
        raise RequestError("prompt_logprobs come before the tokens that resume has")
    return resumed


def sampling_params(sampling: pb.Sampling) -> SamplingParams:
    """Raises ``RequestError`` for values out of range. proto3's absent floats mean "off"."""

    def given(name: str) -> int | None:
        return getattr(sampling, name) if sampling.HasField(name) else None

    params = SamplingParams(
        **_numbers(sampling),
        seed=given("seed"),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
        logprob_token_ids=tuple(sampling.logprob_token_ids),
        stop_token_ids=tuple(sampling.stop_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n or 1,
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        structured_outputs=_structured_outputs(sampling),
        thinking=_thinking(sampling),
    )
    check_params(params)
    return params


def _numbers(sampling: pb.Sampling) -> dict[str, Any]:
    """The numbers; one that is absent and may not be 0 has its default."""
    values = ((name, number, getattr(sampling, name)) for name, number in NUMBERS.items())
    return {
        name: number.default if number.above and not value else value
        for name, number, value in values
    }


def _structured_outputs(sampling: pb.Sampling) -> StructuredOutputs | None:
    """The constraint on the outputs; one of a kind that a newer router knows is no constraint, and
    ``check_params`` rejects it."""
    if not sampling.HasField("structured_outputs"):
        return None
    wanted = sampling.structured_outputs
    kind = wanted.WhichOneof("constraint")
    value = {} if kind is None else {kind: getattr(wanted, kind)}
    if kind == "choice":
        value = {kind: tuple(wanted.choice.texts)}
    return StructuredOutputs(
        **value,
        whitespace=not wanted.compact,
        reasoning_start=wanted.reasoning_start,
        reasoning_end=wanted.reasoning_end,
        param=wanted.param or "structured_outputs",
    )


def _thinking(sampling: pb.Sampling) -> ThinkingBudget | None:
    if not sampling.HasField("thinking"):
        return None
    given = sampling.thinking
    param = given.param or "thinking_token_budget"
    return ThinkingBudget(
        tokens=given.tokens,
        start=given.start,
        end=given.end,
        calls=tuple(given.calls),
        param=param,
    )
