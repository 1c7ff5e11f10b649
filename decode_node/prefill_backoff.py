"""Prefill nodes that lately cost a request seconds by silence, or had no place for this node: they
are not asked again for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..shared.causes import Cause
from ..shared.errors import TransferError
from ..shared.process.backoff import PeerBackoff

# What says something about the node. Every other cause may be one request's own fault, and one
# client's long prompts must not take a prefill node away from everybody.
SILENCE = frozenset(
    {Cause.TIMEOUT_GREET, Cause.TIMEOUT_OPEN, Cause.TIMEOUT_PROGRESS, Cause.PEER_LOST}
)
# What a canary's failure tells of the node as it is, and not of what it computes.
CONDITION = SILENCE | {Cause.NO_PLACE}
MAX_ABSENCES = 1024


class BackedOffError(TransferError):
    """The node was not asked, because its pause lasts."""


@dataclass(slots=True)
class _Pause:
    epoch: int
    avoidance: PeerBackoff
    reason: str = ""
    cause: Cause = Cause.ABSENT


class PrefillBackoff:
    """The newest absence of each address; another start of the process there is asked at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paused: dict[str, _Pause] = {}

    def add(self, address: str, epoch: int, reason: str, cause: Cause = Cause.ABSENT) -> None:
        """Its silence cost a request seconds, or it has no place; of several during one pause, the
        first counts. ``cause`` is what those are told who ask during the pause."""
        known = self._of(address, epoch)
        if known is None:
            if len(self._paused) >= MAX_ABSENCES:
                del self._paused[next(iter(self._paused))]
            known = self._paused[address] = _Pause(epoch, PeerBackoff(self._clock))
        if known.avoidance.begin():
            known.reason, known.cause = reason, cause

    def end(self, address: str) -> None:
        """It works; idempotent."""
        self._paused.pop(address, None)

    def check(self, address: str, epoch: int) -> None:
        """Raise ``BackedOffError`` while the pause lasts."""
        known = self._of(address, epoch)
        if known is not None and (left := known.avoidance.left):
            raise BackedOffError(
                f"{address} is left alone for {left:.1f} s: {known.reason}", cause=known.cause
            )

    def _of(self, address: str, epoch: int) -> _Pause | None:
        known = self._paused.get(address)
        return known if known is not None and known.epoch == epoch else None
