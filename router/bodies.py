"""How many bytes of request bodies the router holds at once, over all requests."""

from __future__ import annotations

from types import TracebackType

from ..shared.errors import OverloadedError


class BodyBudget:
    """Each body is bounded by itself; this bounds their sum, while they are read and parsed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def share(self) -> BodyShare:
        """One request's part, empty at first."""
        return BodyShare(self)


class BodyShare:
    """What one request holds of the budget, given back when the ``with`` block ends."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def take(self, size: int) -> None:
        """Hold so many bytes more. Raises ``OverloadedError`` when there is no room for them."""
        if self._budget.held + size > self._budget.limit:
            raise OverloadedError(
                f"The bodies of all requests together are over the limit of {self._budget.limit} "
                "bytes; try again later."
            )
        self._budget.held += size
        self._bytes += size

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.held -= self._bytes
        self._bytes = 0
