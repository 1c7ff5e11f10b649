"""Sampling parameters as they arrive, checked: a router is not trusted to have done so."""

from __future__ import annotations

import math

from ..proto import tandem_pb2 as pb
from ..shared.engine.plan import SamplingParams
from ..shared.engine.request import check_params


def params_from_wire(sampling: pb.Sampling) -> SamplingParams:
    """Raises ``RequestError`` for values out of range. proto3's absent floats mean "off"."""

    def given(name: str) -> int | None:
        return getattr(sampling, name) if sampling.HasField(name) else None

    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if not math.isclose(sampling.top_p, 0.0) else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=given("seed"),
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=tuple(sampling.stop_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n or 1,
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
    )
    check_params(params)
    return params
