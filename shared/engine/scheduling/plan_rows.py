"""The parts of a step's plan that describe one sequence."""

from __future__ import annotations

from collections.abc import Set

from ..plan import PLACEHOLDER, HiddenStates, RankSampling, SamplerSpec, SequenceStep
from ..sequence import Sequence

_RANK_SAMPLING = tuple(RankSampling.__dataclass_fields__)


def sequence_step(sequence: Sequence, tokens: int) -> SequenceStep:
    """The sequence's next ``tokens``, the last of which may be drawn by the step in flight."""
    start, end = sequence.planned, sequence.planned + tokens
    wants_prompt = sequence.wants_prompt_logprobs
    placeholder = end > sequence.length
    sample = sequence.compute_until is None and end == sequence.target
    place = len(sequence.outputs) + sequence.placeholders  # of the draw
    constraint = sequence.constraint
    return SequenceStep(
        sequence.sequence_id,
        [PLACEHOLDER] if placeholder else sequence.tokens(start, end),
        start,
        list(sequence.block_table),
        sample=sample,
        masked=sample and constraint is not None and constraint.restricts(place),
        placeholder=placeholder,
        prompt_logprobs=sequence.params.prompt_logprobs if wants_prompt else None,
        prompt_targets=sequence.prompt[start + 1 : end + 1] if wants_prompt else [],
        hidden=_hidden(sequence, start, end),
        classify=sequence.classify,
        second_text=sequence.second_text,
    )


def _hidden(sequence: Sequence, start: int, end: int) -> HiddenStates | None:
    """The hidden states that the sequence needs of its tokens ``[start, end)``."""
    if sequence.pooling == "mean":
        return "sum"
    if sequence.pooling == "cls" and start == 0:
        return "first"
    return "last" if sequence.pooling == "last" and end == sequence.target else None


def sampler_spec(sequence: Sequence, eos_token_ids: Set[int]) -> SamplerSpec:
    params = sequence.params
    sampling = RankSampling(**{name: getattr(params, name) for name in _RANK_SAMPLING})
    blocked = set(params.stop_token_ids)
    if not params.ignore_eos:
        blocked |= eos_token_ids
    if params.allowed_token_ids and blocked.issuperset(params.allowed_token_ids):
        blocked = set()  # else no token could be drawn
    return SamplerSpec(
        sequence.sequence_id,
        sampling,
        sequence.seed,
        sequence.prompt if sampling.penalizes else [],
        list(sequence.outputs),
        sorted(blocked) if params.min_tokens else [],
        params.min_tokens,
    )
