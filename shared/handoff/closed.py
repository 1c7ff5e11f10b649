"""Remembers which attempts are over, so that nothing of them comes back to life."""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 4096


class ClosedAttempts:
    """The newest closed attempt of each recent transfer; the oldest transfers are forgotten."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._newest: OrderedDict[int, int] = OrderedDict()

    def add(self, transfer_id: int, attempt: int) -> None:
        newest = max(attempt, self._newest.pop(transfer_id, attempt))
        self._newest[transfer_id] = newest
        if len(self._newest) > self._limit:
            self._newest.popitem(last=False)

    def covers(self, transfer_id: int, attempt: int) -> bool:
        return attempt <= self._newest.get(transfer_id, -1)
