"""Prefill nodes whose silence lately cost a request seconds: nobody waits for them so soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..shared.backoff import Avoidance
from ..shared.causes import Cause
from ..shared.errors import TransferError

# What says something about the node. Every other cause may be one request's own fault, and one
# client's long prompts must not take a prefill node away from everybody.
SILENCE = frozenset(
    {Cause.TIMEOUT_GREET, Cause.TIMEOUT_OPEN, Cause.TIMEOUT_PROGRESS, Cause.PEER_LOST}
)
MAX_ABSENCES = 1024


@dataclass(slots=True)
class _Absence:
    epoch: int
    avoidance: Avoidance
    reason: str = ""


class Absences:
    """The newest absence of each address; another start of the process there is asked at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._absences: dict[str, _Absence] = {}

    def add(self, address: str, epoch: int, reason: str) -> None:
        """Its silence cost a request seconds; of several during one pause, the first counts."""
        known = self._of(address, epoch)
        if known is None:
            if len(self._absences) >= MAX_ABSENCES:
                del self._absences[next(iter(self._absences))]
            known = self._absences[address] = _Absence(epoch, Avoidance(self._clock))
        if known.avoidance.begin():
            known.reason = reason

    def end(self, address: str) -> None:
        """It works; idempotent."""
        self._absences.pop(address, None)

    def check(self, address: str, epoch: int) -> None:
        """Raise ``TransferError`` while the pause lasts."""
        known = self._of(address, epoch)
        if known is not None and (left := known.avoidance.left):
            raise TransferError(
                f"{address} is left alone for {left:.1f} s: {known.reason}", cause=Cause.ABSENT
            )

    def _of(self, address: str, epoch: int) -> _Absence | None:
        known = self._absences.get(address)
        return known if known is not None and known.epoch == epoch else None
