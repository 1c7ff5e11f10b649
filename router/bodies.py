"""How many bytes of request bodies the router holds at once, over all requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..shared.errors import OverloadedError


class BodyBudget:
    """Each body is bounded by itself; this bounds their sum, while they are read and parsed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """One request's part, empty at first, given back when the block ends."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.held -= share.bytes


class BodyShare:
    """What one request holds of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.bytes = 0

    def take(self, size: int) -> None:
        """Hold so many bytes more. Raises ``OverloadedError`` when there is no room for them."""
        if self._budget.held + size > self._budget.limit:
            raise OverloadedError(
                f"The bodies of all requests together are over the limit of {self._budget.limit} "
                "bytes; try again later."
            )
        self._budget.held += size
        self.bytes += size
