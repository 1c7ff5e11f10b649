"""What the head process tells its ranks, and what they answer: plain data, no torch.

The head owns the scheduler and the block pool; ranks own tensors. A rank keeps a ``SamplerSpec``
for each live sequence (penalties need its history), and nothing else between steps: block tables
and tokens travel with every step, so a rank can never hold a stale view of who owns a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. Defaults are OpenAI's.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch their filter off.
    ``logprobs`` is how many alternatives to return beside the chosen token (``None``: nothing).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalizes(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """What a rank must know to sample one sequence, for as long as the sequence lives.

    ``seed`` is already resolved (a 64-bit number, different for each of the n choices): the draw
    for output position i depends on (seed, i) and the logits alone. ``blocked_until`` and
    ``blocked_tokens`` implement ``min_tokens``: those ids cannot be drawn before that many outputs.
    ``prompt`` may be empty where no penalty reads it. ``outputs`` are tokens drawn before this rank
    learned of the sequence (a resumed sequence).
    """

    sequence_id: int
    params: SamplingParams
    seed: int
    prompt: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    blocked_tokens: tuple[int, ...] = ()
    blocked_until: int = 0


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step.

    ``tokens`` are computed at positions ``start, start+1, ...``. ``block_table`` covers at least
    ``start + len(tokens)`` token slots. ``sample``: draw a token from the last position's logits.
    ``prompt_logprobs``: return logprobs of the tokens that follow each computed position
    (``prompt_targets`` has them; shorter than ``tokens`` by one in the last chunk).
    """

    sequence_id: int
    tokens: list[int]
    start: int
    block_table: list[int]
    sample: bool
    prompt_logprobs: int | None = None
    prompt_targets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of a batch. ``added`` precede and ``removed`` are forgotten before it."""

    step: int
    sequences: list[SequenceStep]
    added: list[SamplerSpec] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one position: the chosen token, its logprob and rank (1 is the most likely),
    and the most likely tokens, best first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for one sequence."""

    sequence_id: int
    token: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: sampled tokens, prompt logprobs by sequence, seconds of the forward pass.

    ``failed`` names sequences whose logits were not finite, with the reason.
    """

    step: int
    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


# Why a step, or a sequence in it, may fail.
OUT_OF_MEMORY = "out_of_memory"
COMPUTATION = "computation"
NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class StepFailure:
    """What a rank says of a step that raised: the cause, and the error in words."""

    cause: str
    reason: str


def to_wire(value: Any) -> Any:
    """Dataclasses of this module as nested lists, ready for msgpack."""
    if isinstance(value, (list, tuple)):
        return [to_wire(item) for item in value]
    if isinstance(value, dict):
        return [[key, to_wire(item)] for key, item in value.items()]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return [to_wire(getattr(value, name)) for name in fields]
    return value


# Every field of a row is plain already.
_row_values = attrgetter(*SequenceStep.__dataclass_fields__)


def plan_to_wire(plan: StepPlan) -> list[Any]:
    """What ``to_wire`` gives, without a call for every block of every table: it runs each step."""
    rows = [_row_values(row) for row in plan.sequences]
    return [plan.step, rows, to_wire(plan.added), plan.removed]


def plan_from_wire(wire: list[Any]) -> StepPlan:
    """The inverse of ``plan_to_wire``."""
    step, sequences, added, removed = wire
    return StepPlan(step, [_sequence(s) for s in sequences], [_spec(a) for a in added], removed)


def result_from_wire(wire: list[Any]) -> StepResult:
    """The inverse of ``to_wire`` for a ``StepResult``."""
    step, sampled, prompt_logprobs, failed, seconds = wire
    return StepResult(
        step,
        [Sampled(s, token, logprobs and _logprobs(logprobs)) for s, token, logprobs in sampled],
        {key: [_logprobs(item) for item in items] for key, items in prompt_logprobs},
        dict(failed),
        seconds,
    )


def _sequence(wire: list[Any]) -> SequenceStep:
    return SequenceStep(*wire)


def _spec(wire: list[Any]) -> SamplerSpec:
    sequence_id, params, seed, prompt, outputs, blocked, until = wire
    names = list(SamplingParams.__dataclass_fields__)
    values = dict(zip(names, params, strict=True))
    values["logit_bias"] = dict(values["logit_bias"])
    values["stop"] = tuple(values["stop"])
    values["stop_token_ids"] = tuple(values["stop_token_ids"])
    return SamplerSpec(
        sequence_id,
        SamplingParams(**values),
        seed,
        tuple(prompt),
        tuple(outputs),
        tuple(blocked),
        until,
    )


def _logprobs(wire: list[Any]) -> PositionLogprobs:
    token, logprob, rank, top = wire
    return PositionLogprobs(token, logprob, rank, [(t, p) for t, p in top])
