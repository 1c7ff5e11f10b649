"""A record of the attempts that are over, so that they cannot be opened again."""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 4096


# A transfer and the peer's rank of a part of it; None: all parts.
Key = tuple[int, int | None]


class ClosedAttempts:
    """The newest closed attempt of each recent transfer or part; the oldest are forgotten."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._newest: OrderedDict[Key, int] = OrderedDict()

    def add(self, key: Key, attempt: int) -> None:
        newest = max(attempt, self._newest.pop(key, attempt))
        self._newest[key] = newest
        if len(self._newest) > self._limit:
            self._newest.popitem(last=False)

    def covers(self, key: Key, attempt: int) -> bool:
        return attempt <= self._newest.get(key, -1)
