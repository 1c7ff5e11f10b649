"""Limits on what the router holds at once for all requests: bodies, prompts, answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from ...shared.errors import OverloadedError


class MemoryBudget:
    """A limit on the sum over all requests, each of which has limits of its own. ``unit`` is its
    name in errors."""

    def __init__(self, limit: int, unit: str) -> None:
        self.limit = limit
        self.unit = unit
        self.held = 0
        self.lock = Lock()  # threads that format large answers count them

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        """One request's share, empty at first, returned at the end of the block."""
        share = MemoryShare(self)
        try:
            yield share
        finally:
            with self.lock:
                self.held -= share.size


class MemoryShare:
    """The part of a budget that one request holds."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.size = 0

    def take(self, size: int) -> None:
        """Hold ``size`` more. Raises ``OverloadedError`` if it does not fit into the budget."""
        budget = self._budget
        with budget.lock:
            if budget.held + size > budget.limit:
                raise OverloadedError(
                    f"The {budget.unit} of all requests together are over the limit of "
                    f"{budget.limit}; try again later."
                )
            budget.held += size
            self.size += size
