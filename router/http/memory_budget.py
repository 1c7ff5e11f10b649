"""Limits on the memory of all requests together: bodies, prompts and responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from ...shared.errors import OverloadedError


class MemoryBudget:
    """A limit on the sum over all requests; each request has its own limits too. ``unit`` names it
    in errors."""

    def __init__(self, limit: int, unit: str) -> None:
        self.limit = limit
        self.unit = unit
        self.used = 0
        self.lock = Lock()  # large responses are formatted, and counted, in threads

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        """A request's share, initially empty, which is released at the end of the block."""
        share = MemoryShare(self)
        try:
            yield share
        finally:
            with self.lock:
                self.used -= share.size


class MemoryShare:
    """The part of a budget that one request holds."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.size = 0

    def take(self, size: int) -> None:
        """Add ``size``. Raises ``OverloadedError`` if it does not fit into the budget."""
        budget = self._budget
        with budget.lock:
            if budget.used + size > budget.limit:
                raise OverloadedError(
                    f"The {budget.unit} of all requests together are over the limit of "
                    f"{budget.limit}; try again later."
                )
            budget.used += size
            self.size += size
