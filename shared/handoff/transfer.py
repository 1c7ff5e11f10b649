"""The life of a transfer as the two heads see it: two enums, one transition table each.

No sockets and no clock of its own. A machine is idempotent on (transfer, attempt): news of an older
attempt, or of a state that this attempt has been in, changes nothing; news that cannot be is an
error in our own code and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from ..errors import TransferError


class DecodeState(Enum):
    """Where an attempt is, for the node that receives."""

    RESERVED = "reserved"  # blocks are held, nobody has been asked
    OPENING = "opening"  # a prefill node was asked
    RECEIVING = "receiving"  # it accepted; KV arrives
    VERIFYING = "verifying"  # all ranks have everything; counts and digests are compared
    COMMITTED = "committed"  # the blocks belong to the sequence
    DECODING = "decoding"  # the sequence is in the running batch
    FAILED = "failed"  # this attempt is over; the request is not


class PrefillState(Enum):
    """Where an attempt is, for the node that sends."""

    QUEUED = "queued"  # waits for the scheduler
    RUNNING = "running"  # chunks compute; nothing has left yet
    STREAMING = "streaming"  # layers leave while others compute
    HELD = "held"  # all is sent; blocks stay until the release or the lease's end
    RELEASED = "released"  # no block is held


DECODE_TRANSITIONS: Mapping[DecodeState, frozenset[DecodeState]] = {
    DecodeState.RESERVED: frozenset({DecodeState.OPENING, DecodeState.FAILED}),
    DecodeState.OPENING: frozenset({DecodeState.RECEIVING, DecodeState.FAILED}),
    DecodeState.RECEIVING: frozenset({DecodeState.VERIFYING, DecodeState.FAILED}),
    DecodeState.VERIFYING: frozenset({DecodeState.COMMITTED, DecodeState.FAILED}),
    DecodeState.COMMITTED: frozenset({DecodeState.DECODING, DecodeState.FAILED}),
    DecodeState.DECODING: frozenset(),
    DecodeState.FAILED: frozenset(),
}

PREFILL_TRANSITIONS: Mapping[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: frozenset({PrefillState.RUNNING, PrefillState.RELEASED}),
    PrefillState.RUNNING: frozenset({PrefillState.STREAMING, PrefillState.RELEASED}),
    PrefillState.STREAMING: frozenset({PrefillState.HELD, PrefillState.RELEASED}),
    PrefillState.HELD: frozenset({PrefillState.RELEASED}),
    PrefillState.RELEASED: frozenset(),
}


class IllegalTransitionError(TransferError):
    """A state was announced that cannot follow; a bug on this side of the wire."""


S = TypeVar("S", DecodeState, PrefillState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Generic[S]):
    """Seconds that each state may last, and that a state may pass without progress."""

    state_seconds: Mapping[S, float]
    progress_seconds: Mapping[S, float] = field(default_factory=dict)


DECODE_LIMITS: Limits[DecodeState] = Limits(
    state_seconds={
        DecodeState.RESERVED: 10.0,
        DecodeState.OPENING: 5.0,
        DecodeState.RECEIVING: 300.0,
        DecodeState.VERIFYING: 5.0,
        DecodeState.COMMITTED: 60.0,
    },
    progress_seconds={DecodeState.RECEIVING: 30.0},
)

PREFILL_LIMITS: Limits[PrefillState] = Limits(
    state_seconds={
        PrefillState.QUEUED: 120.0,
        PrefillState.RUNNING: 300.0,
        PrefillState.STREAMING: 300.0,
        PrefillState.HELD: 30.0,
    },
    progress_seconds={PrefillState.RUNNING: 60.0, PrefillState.STREAMING: 30.0},
)


class _Attempts(Generic[S]):
    """One transfer's current attempt: its state, since when, and when something last moved."""

    def __init__(
        self,
        transfer_id: int,
        attempt: int,
        *,
        start: S,
        table: Mapping[S, frozenset[S]],
        limits: Limits[S],
        clock: Callable[[], float],
    ) -> None:
        self.transfer_id = transfer_id
        self.attempt = attempt
        self._table: Mapping[S, frozenset[S]] = table
        self._limits: Limits[S] = limits
        self._clock = clock
        self._enter_first(start)

    def _enter_first(self, start: S) -> None:
        self.state: S = start
        self._visited: set[S] = {start}
        self._entered = self._moved = self._clock()

    @property
    def over(self) -> bool:
        """Whether this attempt can go nowhere else."""
        return not self._table[self.state]

    def advance(self, attempt: int, state: S) -> bool:
        """Enter a state; False when that is old news, IllegalTransitionError when it cannot be."""
        if attempt < self.attempt or (attempt == self.attempt and state in self._visited):
            return False
        if attempt > self.attempt:
            raise IllegalTransitionError(
                f"transfer {self.transfer_id:x}: news of attempt {attempt}, "
                f"but attempt {self.attempt} is the newest"
            )
        if state not in self._table[self.state]:
            raise IllegalTransitionError(
                f"transfer {self.transfer_id:x} attempt {attempt}: "
                f"{self.state.value} cannot become {state.value}"
            )
        self.state = state
        self._visited.add(state)
        self._entered = self._moved = self._clock()
        return True

    def progress(self, attempt: int) -> None:
        """Something moved (a chunk computed, bytes acknowledged)."""
        if attempt == self.attempt:
            self._moved = self._clock()

    @property
    def deadline(self) -> float:
        """When this state is overdue, by the injected clock; infinity for a state without limit."""
        state = self._entered + self._limits.state_seconds.get(self.state, float("inf"))
        progress = self._moved + self._limits.progress_seconds.get(self.state, float("inf"))
        return min(state, progress)

    def overdue(self) -> str:
        """Empty, or what to tell: which state lasted too long."""
        now = self._clock()
        if now <= self.deadline:
            return ""
        return f"{self.state.value} for {now - self._entered:.1f} s, {now - self._moved:.1f} s idle"


class DecodeTransfer(_Attempts[DecodeState]):
    """The decode head's record of one transfer, over all its attempts."""

    def __init__(
        self,
        transfer_id: int,
        *,
        clock: Callable[[], float],
        attempt: int = 1,
        limits: Limits[DecodeState] = DECODE_LIMITS,
    ) -> None:
        super().__init__(
            transfer_id,
            attempt,
            start=DecodeState.RESERVED,
            table=DECODE_TRANSITIONS,
            limits=limits,
            clock=clock,
        )

    def fail(self, attempt: int) -> bool:
        """End an attempt; False when it is over already."""
        return not self.over and self.advance(attempt, DecodeState.FAILED)

    def retry(self) -> int:
        """Begin the next attempt with the same reservation; returns its number."""
        if self.state is not DecodeState.FAILED:
            raise IllegalTransitionError(
                f"transfer {self.transfer_id:x}: attempt {self.attempt} is still "
                f"{self.state.value}; only a failed one is tried again"
            )
        self.attempt += 1
        self._enter_first(DecodeState.RESERVED)
        return self.attempt


class PrefillTransfer(_Attempts[PrefillState]):
    """The prefill head's record of one attempt at a transfer."""

    def __init__(
        self,
        transfer_id: int,
        attempt: int,
        *,
        clock: Callable[[], float],
        limits: Limits[PrefillState] = PREFILL_LIMITS,
    ) -> None:
        super().__init__(
            transfer_id,
            attempt,
            start=PrefillState.QUEUED,
            table=PREFILL_TRANSITIONS,
            limits=limits,
            clock=clock,
        )

    def release(self, attempt: int) -> bool:
        """Let go, from any state; False when it was released before."""
        return self.advance(attempt, PrefillState.RELEASED)
