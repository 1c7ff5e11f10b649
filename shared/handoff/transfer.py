"""The states of one attempt at a transfer, on each of the two heads.

The tables here define the transitions, and how long each state may last without progress; no other
module keeps a state of a transfer. There are no sockets here, and the clock is an argument. Each
(transfer, attempt) has its own ``TransferState``, so late events of an old attempt cannot affect
the next one.

States that move KV or wait for a computation have no time limit of their own: their duration
depends on the model, the prompt and the queue, and a transfer that makes progress should go on
until its request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from ..errors import TransferError

INFINITY = float("inf")
GREET_SECONDS = 3.0
# Limit of the wait for the peer's counts, once every rank has verified every byte.
ACCOUNT_SECONDS = 1.0


class DecodeState(Enum):
    """The state of an attempt on the node that receives."""

    RESERVED = "reserved"  # blocks are reserved; the ranks greet each other
    OPENING = "opening"  # the request to the prefill node was sent
    RECEIVING = "receiving"  # it accepted; KV arrives
    VERIFYING = "verifying"  # every rank has every byte, intact; the two sides' counts are compared
    COMMITTED = "committed"  # the blocks belong to the sequence, which can be scheduled
    FAILED = "failed"  # this attempt is over; the request is not


class PrefillState(Enum):
    """The state of an attempt on the node that sends."""

    QUEUED = "queued"  # waits for the scheduler
    RUNNING = "running"  # its first chunk computes
    STREAMING = "streaming"  # layers leave while later chunks compute
    HELD = "held"  # all layers are computed; the blocks stay until every byte is confirmed
    RELEASED = "released"  # the blocks are released


DECODE_TRANSITIONS: Mapping[DecodeState, frozenset[DecodeState]] = {
    DecodeState.RESERVED: frozenset({DecodeState.OPENING, DecodeState.FAILED}),
    DecodeState.OPENING: frozenset({DecodeState.RECEIVING, DecodeState.FAILED}),
    DecodeState.RECEIVING: frozenset({DecodeState.VERIFYING, DecodeState.FAILED}),
    DecodeState.VERIFYING: frozenset({DecodeState.COMMITTED, DecodeState.FAILED}),
    DecodeState.COMMITTED: frozenset(),
    DecodeState.FAILED: frozenset(),
}

PREFILL_TRANSITIONS: Mapping[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: frozenset({PrefillState.RUNNING, PrefillState.RELEASED}),
    PrefillState.RUNNING: frozenset({PrefillState.STREAMING, PrefillState.RELEASED}),
    PrefillState.STREAMING: frozenset({PrefillState.HELD, PrefillState.RELEASED}),
    PrefillState.HELD: frozenset({PrefillState.RELEASED}),
    PrefillState.RELEASED: frozenset(),
}

S = TypeVar("S", DecodeState, PrefillState)


class IllegalTransitionError(TransferError):
    """The state cannot follow the present one: a bug in this process."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of a state, in seconds: its duration, and its time without progress."""

    seconds: float = INFINITY
    idle: float = INFINITY


class TransferState(Generic[S]):
    """One attempt's state, when it began, and when it last made progress.

    ``request_seconds``: when the request ends, which ends the attempt in any state.
    """

    def __init__(
        self,
        name: str,
        start: S,
        table: Mapping[S, frozenset[S]],
        limits: Mapping[S, Limit],
        request_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._table: Mapping[S, frozenset[S]] = table
        self._limits: Mapping[S, Limit] = limits
        self._clock = clock
        self.state: S = start
        self._visited: set[S] = {start}
        self._entered = self._moved = clock()
        self._ends = self._entered + request_seconds

    @property
    def over(self) -> bool:
        """True if no state can follow."""
        return not self._table[self.state]

    def enter(self, state: S) -> bool:
        """Enter a state; False if it was entered before. Raises ``IllegalTransitionError``."""
        if state in self._visited:
            return False
        if state not in self._table[self.state]:
            raise IllegalTransitionError(
                f"{self._name}: {self.state.value} cannot become {state.value}"
            )
        self.state = state
        self._visited.add(state)
        self._entered = self._moved = self._clock()
        return True

    def progress(self) -> None:
        """Record progress: a computed chunk, or a sign of life of the peer."""
        self._moved = self._clock()

    @property
    def remaining(self) -> float:
        """Seconds until this state is overdue; infinity in a final state."""
        if self.over:
            return INFINITY
        limit = self._limits.get(self.state, Limit())
        deadline = min(self._entered + limit.seconds, self._moved + limit.idle, self._ends)
        return deadline - self._clock()

    @property
    def idle(self) -> float:
        """Seconds without progress."""
        return self._clock() - self._moved

    def overdue(self) -> str:
        """A message about the state if it is overdue, else empty."""
        if self.remaining > 0:
            return ""
        lasted = self._clock() - self._entered
        what = f"{self.state.value} for {lasted:.1f} s, {self.idle:.1f} s idle"
        return f"{what}, when the request's time was over" if self.request_over else what

    @property
    def request_remaining(self) -> float:
        """Seconds until the request ends."""
        return max(0.0, self._ends - self._clock())

    @property
    def request_over(self) -> bool:
        return self.request_remaining == 0


def decode_transfer_state(
    name: str, *, request_seconds: float, silence_seconds: float, clock: Callable[[], float]
) -> TransferState[DecodeState]:
    """The state of an attempt that receives. ``silence_seconds``: the peer is lost after this long
    without a sign of life."""
    limits = {
        DecodeState.RESERVED: Limit(GREET_SECONDS),
        DecodeState.OPENING: Limit(silence_seconds),
        DecodeState.RECEIVING: Limit(idle=silence_seconds),
        DecodeState.VERIFYING: Limit(ACCOUNT_SECONDS),
    }
    return TransferState(
        name, DecodeState.RESERVED, DECODE_TRANSITIONS, limits, request_seconds, clock
    )


def prefill_transfer_state(
    name: str, *, request_seconds: float, still_seconds: float, clock: Callable[[], float]
) -> TransferState[PrefillState]:
    """The state of an attempt that sends. ``still_seconds``: how long the node may compute nothing
    while the prompt waits.

    The progress of a held transfer is watched by the data plane, which sees acknowledgements.
    """
    still = Limit(idle=still_seconds)
    limits = {
        PrefillState.QUEUED: still,
        PrefillState.RUNNING: still,
        PrefillState.STREAMING: still,
    }
    return TransferState(
        name, PrefillState.QUEUED, PREFILL_TRANSITIONS, limits, request_seconds, clock
    )
