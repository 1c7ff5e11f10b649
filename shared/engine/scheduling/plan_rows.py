"""The parts of a step's plan that describe one sequence."""

from __future__ import annotations

from collections.abc import Set

from ...models.spec import Pooling
from ..plan import PLACEHOLDER, HiddenStates, PooledRow, RankSampling, SamplerSpec, SequenceStep
from ..sequence import Sequence
from ..work import Compute, Generate, Pool

_RANK_SAMPLING = tuple(RankSampling.__dataclass_fields__)


def sequence_step(sequence: Sequence, tokens: int, first: int) -> SequenceStep:
    """A row with the sequence's next ``tokens``, of which the step in flight may draw the last, and
    its blocks from the ``first`` on that ranks do not have."""
    start, end = sequence.planned, sequence.planned + tokens
    placeholder, last = end > sequence.length, end == sequence.target
    row = (
        sequence.sequence_id,
        [PLACEHOLDER] if placeholder else sequence.tokens(start, end),
        start,
        sequence.block_table[first:],
    )
    match work := sequence.work:
        case Generate():
            masked = False
            if last and work.constraint is not None:
                place = len(sequence.outputs) + sequence.placeholders  # of the draw
                masked = work.constraint.restricts(place)
            top: int | None = None
            targets: tuple[int, ...] = ()
            if sequence.wants_prompt_logprobs:
                top = work.params.prompt_logprobs
                targets = tuple(sequence.prompt[start + 1 : end + 1])
            return SequenceStep(*row, last, top, targets, masked, first_block=first)
        case Compute():
            return SequenceStep(*row, sample=False, first_block=first)
        case Pool():
            return SequenceStep(
                *row,
                sample=False,
                first_block=first,
                pool=PooledRow(
                    _hidden(work.pooling, first=start == 0, last=last),
                    work.classify,
                    work.second_text,
                ),
            )


def _hidden(pooling: Pooling, *, first: bool, last: bool) -> HiddenStates | None:
    """The hidden states needed from a chunk of a prompt."""
    match pooling:
        case "mean":
            return "sum"
        case "cls":
            return "first" if first else None
        case "last":
            return "last" if last else None


def sampler_spec(sequence: Sequence, eos_token_ids: Set[int]) -> SamplerSpec:
    work = sequence.generation
    params = work.params
    sampling = RankSampling(**{name: getattr(params, name) for name in _RANK_SAMPLING})
    blocked = set(params.stop_token_ids)
    if not params.ignore_eos:
        blocked |= eos_token_ids
    if params.allowed_token_ids and blocked.issuperset(params.allowed_token_ids):
        blocked = set()  # else no token could be drawn
    return SamplerSpec(
        sequence.sequence_id,
        sampling,
        work.seed,
        sequence.prompt if sampling.penalizes else [],
        list(sequence.outputs),
        sorted(blocked) if params.min_tokens else [],
        params.min_tokens,
    )
