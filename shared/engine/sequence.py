"""One sequence's state, the phases it may go through, and the output of a step.

::

    WAITING ──► RUNNING ──► FINISHED
       │  ▲        │
       ▼  └────────┘ preempted: blocks given back, tokens kept, computed again later
    RECEIVING ──► WAITING   committed, or the transfer failed: scheduled like any other

Only the scheduler changes a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .plan import PositionLogprobs
from .work import Compute, Generate, Pool, Work


class Phase(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    FINISHED = "finished"


_TRANSITIONS = {
    (Phase.WAITING, Phase.RUNNING),
    (Phase.WAITING, Phase.RECEIVING),
    (Phase.RECEIVING, Phase.WAITING),
    (Phase.RUNNING, Phase.WAITING),
    (Phase.WAITING, Phase.FINISHED),
    (Phase.RECEIVING, Phase.FINISHED),
    (Phase.RUNNING, Phase.FINISHED),
}


class FinishReason(Enum):
    """Reason for the end of a sequence."""

    STOP = "stop"
    LENGTH = "length"
    COMPUTED = "computed"  # a prefill-only sequence reached its last position
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens generated for it so far.

    ``computed`` counts leading tokens whose KV is in the blocks of ``block_table``, and
    ``in_flight`` the tokens after them that steps in flight compute. Each of the ``placeholders``
    stands for one token that such a step draws. ``siblings`` are the other choices of the same
    request: they share the prompt's full blocks and start when this one's prompt is computed.
    ``hidden`` has the vectors that the steps return for a ``Pool``.
    """

    sequence_id: int
    prompt: list[int]
    work: Work
    index: int = 0
    priority: int = 0
    arrival: int = 0
    salt: str = ""
    mid_stream: bool = False  # its client is already reading, so it goes before new arrivals
    phase: Phase = Phase.WAITING
    outputs: list[int] = field(default_factory=list)
    resumed: int = 0  # the number of outputs drawn by another node
    computed: int = 0
    in_flight: int = 0
    placeholders: int = 0
    cached: int = 0  # prompt tokens from the prefix index at the first match
    received: int = 0  # prompt tokens computed by a prefill node
    block_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    published: int = 0  # leading blocks in the prefix index, or excluded from it
    siblings: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    hidden: list[bytes] = field(default_factory=list)
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str = ""
    unfollowable: bool = False  # the error is the constraint's

    @property
    def length(self) -> int:
        """The number of tokens so far, prompt and outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def generation(self) -> Generate:
        """The work of a sequence that generates."""
        assert isinstance(self.work, Generate), f"sequence {self.sequence_id} generates nothing"
        return self.work

    @property
    def has_drawn(self) -> bool:
        """True if an output was drawn here."""
        return len(self.outputs) > self.resumed

    @property
    def planned(self) -> int:
        """The number of leading tokens that are computed once the steps in flight have ended."""
        return self.computed + self.in_flight

    @property
    def target(self) -> int:
        """The number of tokens to compute before the sequence samples again or ends."""
        match self.work:
            case Generate():
                return self.length + self.placeholders
            case Compute(until):
                return until
            case Pool():
                return len(self.prompt)

    @property
    def decoding(self) -> bool:
        """True if the only token left to plan was sampled, or is a placeholder."""
        sampled = self.outputs or self.placeholders
        return bool(sampled) and self.planned == self.length + self.placeholders - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while requested prompt logprobs are not fully planned."""
        if not isinstance(self.work, Generate) or self.work.params.prompt_logprobs is None:
            return False
        return not (self.outputs or self.placeholders)

    @property
    def wants_every_position(self) -> bool:
        """True if every position must be computed, even if its KV is cached."""
        if isinstance(self.work, Pool):
            return self.work.pooling in ("mean", "cls")
        return self.wants_prompt_logprobs

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens at positions ``[start, end)``."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.outputs[start - prompt : end - prompt]
        if end <= prompt:
            return self.prompt[start:end]
        return self.prompt[start:] + self.outputs[: end - prompt]

    def move(self, phase: Phase) -> None:
        """Enter ``phase``. Raises ``RuntimeError`` for an illegal transition, which is a bug."""
        if (self.phase, phase) not in _TRANSITIONS:
            raise RuntimeError(f"sequence {self.sequence_id}: {self.phase} cannot become {phase}")
        self.phase = phase


@dataclass(slots=True)
class StepOutput:
    """New tokens of one sequence from one step, and the finish reason if it ended with them.

    A token that ended it is not among ``tokens``; ``stop_logprobs`` are its logprobs.
    ``started_at``, set when the prompt is computed, is the start of its first step by the monotonic
    clock. Later readers must not look at the sequence instead, which may have changed.
    """

    sequence: Sequence
    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    stop_logprobs: PositionLogprobs | None = None
    prompt_done: bool = False  # the prompt is computed; comes before the first token
    started_at: float = 0.0
    finish_reason: FinishReason | None = None

    def add_logprobs(self, logprobs: list[PositionLogprobs]) -> None:
        """Add the logprobs of the drawn tokens, without those after the end."""
        count = len(self.tokens)
        self.logprobs.extend(logprobs[:count])
        if self.sequence.stop_token is not None and len(logprobs) > count:
            self.stop_logprobs = logprobs[count]
