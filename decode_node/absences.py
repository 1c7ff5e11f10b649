"""Prefill nodes whose silence lately cost a request seconds: nobody waits for them so soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..shared.causes import Cause
from ..shared.errors import TransferError

# What says something about the node. Every other cause may be one request's own fault, and one
# client's long prompts must not take a prefill node away from everybody.
SILENCE = frozenset(
    {Cause.TIMEOUT_GREET, Cause.TIMEOUT_OPEN, Cause.TIMEOUT_PROGRESS, Cause.PEER_LOST}
)
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
MAX_ABSENCES = 1024


@dataclass(frozen=True, slots=True)
class _Absence:
    epoch: int
    pause: float
    until: float
    reason: str


class Absences:
    """The newest absence of each address. Each pause is twice as long as the one before, until
    something works; another start of the process there is asked at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._absences: dict[str, _Absence] = {}

    def add(self, address: str, epoch: int, reason: str) -> None:
        """Nothing new while a pause lasts: all who waited together come back together."""
        now = self._clock()
        known = self._of(address, epoch)
        if known is not None and now < known.until:
            return
        pause = FIRST_PAUSE_SECONDS
        if known is not None:
            pause = min(2 * known.pause, LONGEST_PAUSE_SECONDS)
        elif len(self._absences) >= MAX_ABSENCES:
            del self._absences[next(iter(self._absences))]
        self._absences[address] = _Absence(epoch, pause, now + pause, reason)

    def end(self, address: str) -> None:
        """It works; idempotent."""
        self._absences.pop(address, None)

    def check(self, address: str, epoch: int) -> None:
        """Raise ``TransferError`` while the pause lasts."""
        known = self._of(address, epoch)
        left = known.until - self._clock() if known is not None else 0.0
        if known is not None and left > 0:
            raise TransferError(
                f"{address} is left alone for {left:.1f} s: {known.reason}", cause=Cause.ABSENT
            )

    def _of(self, address: str, epoch: int) -> _Absence | None:
        known = self._absences.get(address)
        return known if known is not None and known.epoch == epoch else None
