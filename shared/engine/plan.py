"""One step's plan and its result, as they travel between the head and its ranks. No torch.

The head owns the scheduler and the block pool; ranks own tensors. For each live sequence a rank
keeps a slot: its block table, its last token, and what the sampler needs. A plan has only what
changed. A sequence that lost its blocks, or was in a step that failed, is removed from the ranks
and sent again as a whole, so a rank never has a stale view of who owns a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Literal, NamedTuple

from ...proto.packed_logprobs import unpack_logprobs
from ..config.sampling_fields import SamplingNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSampling(SamplingNumbers):
    """The sampling parameters that ranks read; the rest of ``SamplingParams`` stays in the head."""

    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def penalizes(self) -> bool:
        """True if draws depend on the tokens before them."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """Everything a rank needs to sample one sequence, for as long as the sequence lives.

    ``seed`` is already resolved (a 64-bit number, different for each of the n choices): the draw
    for output position i depends on (seed, i) and the logits alone. ``blocked_until`` and
    ``blocked_tokens`` implement ``min_tokens``: those ids cannot be drawn among the first
    ``blocked_until`` outputs. ``prompt`` may be empty if no penalty reads it. ``outputs`` are
    tokens drawn before this rank got the spec (a resumed sequence).
    """

    sequence_id: int
    params: RankSampling
    seed: int
    prompt: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    blocked_tokens: list[int] = field(default_factory=list)
    blocked_until: int = 0


# The hidden states that a row returns, as one vector: the first token's, the last token's, or the
# sum over all tokens. They are final, after the model's last norm.
HiddenStates = Literal["first", "last", "sum"]


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The number of sequences that ranks may have at once, and of blocks that each may have."""

    sequences: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that a step may have: ``tokens`` in all, ``sequences`` with the private ones, and
    ``length`` of a sequence with its cached tokens."""

    tokens: int
    sequences: int
    length: int


# Private sequences, which test a peer, may run beside as many others as a node allows.
PRIVATE_SEQS = 8

# Stands for a token id that is not known yet.
PLACEHOLDER = -1


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The hidden states that a row returns, or with ``classify`` the classifier's logits for them:
    for their mean instead of the sum, since the step has the whole prompt then. ``second_text`` is
    the position at which the second text of a pair begins; 0 if there is only one. ``hidden`` is
    ``None`` for a chunk whose hidden states are not needed."""

    hidden: HiddenStates | None
    classify: bool = False
    second_text: int = 0


class SequenceStep(NamedTuple):
    """One sequence's share of a step.

    ``tokens`` are computed at positions ``start, start+1, ...``. ``blocks`` are the entries of its
    block table from ``first_block`` on; ranks have the earlier ones. The table then covers at least
    ``start + len(tokens)`` token slots. ``sample``: draw from the last position's logits.
    The only token may be ``PLACEHOLDER``: it stands for the one that the step before draws for this
    sequence.
    ``masked``: draw after the step's ``TokenMasks`` have arrived.
    ``prompt_logprobs``: return logprobs of ``prompt_targets``, the tokens that follow the computed
    positions (one fewer than ``tokens`` in the last chunk).
    ``pool``: return hidden states.
    """

    sequence_id: int
    tokens: list[int]
    start: int
    blocks: list[int]
    sample: bool
    prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()
    masked: bool = False
    pool: PooledRow | None = None
    first_block: int = 0


class NewBlocks(NamedTuple):
    """A row's blocks, from the ``first`` entry of its block table on."""

    first: int
    blocks: list[int]


class PromptTargets(NamedTuple):
    """A row's ``prompt_logprobs`` and ``prompt_targets``."""

    top: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The rows of a step by columns, which is how they travel: a step has hundreds, and most only
    continue a sequence by a token. A list of numbers takes a fraction of the time of as many rows
    to decode, and kernels need lists.

    ``tokens`` has those of all rows, one row after the other, and ``count`` the number of each
    row's. What only few rows have is in dicts, by row number; ``masked`` lists sequence ids.
    """

    sequence_id: list[int]
    start: list[int]
    sample: list[bool]
    count: list[int]
    tokens: list[int]
    blocks: dict[int, NewBlocks]
    prompt_logprobs: dict[int, PromptTargets]
    pool: dict[int, PooledRow]
    masked: list[int]

    @classmethod
    def of(cls, rows: Iterable[SequenceStep]) -> StepColumns:
        columns = [*zip(*rows, strict=True)]
        if not columns:
            return cls([], [], [], [], [], {}, {}, {}, [])
        keys, tokens, starts, blocks, samples, tops, targets, masked, pools, firsts = columns
        return cls(
            [*keys],
            [*starts],
            [*samples],
            [*map(len, tokens)],
            [*chain.from_iterable(tokens)],
            {row: NewBlocks(firsts[row], each) for row, each in enumerate(blocks) if each},
            {
                row: PromptTargets(top, targets[row])
                for row, top in enumerate(tops)
                if top is not None
            },
            {row: each for row, each in enumerate(pools) if each is not None},
            [*compress(keys, masked)],
        )

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.start)

    @property
    def only_decode(self) -> bool:
        """True if each row is one token that is followed by a draw."""
        return all(self.sample) and len(self.tokens) == len(self.start) and not self.prompt_logprobs


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of a batch. Before it, ranks forget the sequences of ``removed``, then add
    the specs of ``added``.

    ``ahead``: planned while the step before was in flight, and void if that one fails.
    """

    step: int
    columns: StepColumns
    added: list[SamplerSpec] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    ahead: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        rows: Iterable[SequenceStep],
        added: Iterable[SamplerSpec] = (),
        removed: Iterable[int] = (),
        *,
        ahead: bool = False,
    ) -> StepPlan:
        return cls(step, StepColumns.of(rows), [*added], [*removed], ahead)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that rows of a step may draw, by sequence: one bit each, from the lowest bit of
    the first byte. A masked row without a mask may draw any token, or its draw is discarded."""

    step: int
    masks: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one position: the chosen token, its logprob and rank (1 is the most likely),
    and the most likely tokens, best first, as ``pack_logprobs`` writes them."""

    token: int
    logprob: float
    rank: int
    packed_top: bytes = b""

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens with their logprobs, best first."""
        return unpack_logprobs(self.packed_top)


@dataclass(slots=True)
class StepResult:
    """The output of a step by sequence, and the seconds of its forward pass.

    ``sampled`` are the drawn tokens, ``logprobs`` those of the sequences that ask for their
    logprobs. ``failed`` maps sequences whose logits were not finite to the reason. ``hidden`` has
    one vector for each row with ``hidden``, as packed float32.
    """

    step: int
    sampled: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    hidden: dict[int, bytes] = field(default_factory=dict)


# Causes of a failed step, or of a failed sequence in it.
OUT_OF_MEMORY = "out_of_memory"
COMPUTATION = "computation"
NOT_FINITE = "not_finite"
VOID = "void"  # it was planned on top of one that failed


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The cause of a step that raised on a rank, and the error's message."""

    cause: str
    reason: str
