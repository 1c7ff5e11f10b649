"""Backoff from prefill nodes that were silent for seconds, or had no place for this node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...shared.causes import Cause
from ...shared.errors import TransferError
from ...shared.process.backoff import PeerBackoff

# Causes that say something about the node. Any other may be due to a single request, and one
# client's long prompts must not take a prefill node away from all others.
SILENCE = frozenset(
    {Cause.TIMEOUT_GREET, Cause.TIMEOUT_OPEN, Cause.TIMEOUT_PROGRESS, Cause.PEER_LOST}
)
# Causes of a failed canary that describe the node's condition, not its KV.
CONDITION = SILENCE | {Cause.NO_PLACE}
MAX_ADDRESSES = 1024


class BackedOffError(TransferError):
    """The node was not contacted, because this node backs off from it."""


@dataclass(slots=True)
class _Entry:
    epoch: int
    backoff: PeerBackoff
    reason: str = ""
    cause: Cause = Cause.ABSENT


class PrefillBackoff:
    """One backoff for each address, until another process starts there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def add(self, address: str, epoch: int, reason: str, cause: Cause = Cause.ABSENT) -> None:
        """Back off from a node; failures during a pause do not extend it.

        ``cause`` becomes the cause of each ``BackedOffError`` during the pause.
        """
        entry = self._of(address, epoch)
        if entry is None:
            if len(self._entries) >= MAX_ADDRESSES:
                del self._entries[next(iter(self._entries))]
            entry = self._entries[address] = _Entry(epoch, PeerBackoff(self._clock))
        if entry.backoff.begin():
            entry.reason, entry.cause = reason, cause

    def end(self, address: str) -> None:
        """The node works. Idempotent."""
        self._entries.pop(address, None)

    def check(self, address: str, epoch: int) -> None:
        """Raise ``BackedOffError`` during a pause."""
        entry = self._of(address, epoch)
        if entry is not None and (seconds := entry.backoff.remaining):
            raise BackedOffError(
                f"{address} is not contacted for another {math.ceil(seconds)} s: {entry.reason}",
                cause=entry.cause,
            )

    def _of(self, address: str, epoch: int) -> _Entry | None:
        entry = self._entries.get(address)
        return entry if entry is not None and entry.epoch == epoch else None
