"""How much the router holds at once, over all requests: bodies, prompts, answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...shared.errors import OverloadedError


class Budget:
    """Each request is bounded by itself; this bounds their sum. ``what`` is its name in errors."""

    def __init__(self, limit: int, what: str) -> None:
        self.limit = limit
        self.what = what
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One request's part, empty at first, given back when the block ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self.held -= share.size


class Share:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0

    def take(self, size: int) -> None:
        """Hold so much more. Raises ``OverloadedError`` when there is no room for it."""
        budget = self._budget
        if budget.held + size > budget.limit:
            raise OverloadedError(
                f"The {budget.what} of all requests together are over the limit of {budget.limit}; "
                "try again later."
            )
        budget.held += size
        self.size += size
