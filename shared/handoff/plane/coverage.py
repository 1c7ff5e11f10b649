"""The (layer, token) cells of a transfer that have been handled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class OverlapError(ValueError):
    """A cell would be handled twice."""


class Coverage:
    """Disjoint token intervals for each layer; neighbours merge, so the lists stay short.

    ``first_tokens``: the first token of each layer, if not ``first_token`` for all.
    """

    def __init__(
        self, num_layers: int, first_token: int, end_token: int, first_tokens: Sequence[int] = ()
    ) -> None:
        self.num_layers = num_layers
        self.end_token = end_token
        self.cells = 0
        self._first_tokens = first_tokens or [first_token] * num_layers
        self.total = sum(end_token - first for first in self._first_tokens)
        self._intervals: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]

    @property
    def complete(self) -> bool:
        return self.cells == self.total

    def holds(self, first_layer: int, end_layer: int, first_token: int, end_token: int) -> bool:
        """True if the rectangle is not empty and lies within the transfer."""
        if not 0 <= first_layer < end_layer <= self.num_layers:
            return False
        first = max(self._first_tokens[first_layer:end_layer])
        return first <= first_token < end_token <= self.end_token

    def missing(self, layer: int, first_token: int, end_token: int) -> list[tuple[int, int]]:
        """The parts of an interval, clipped to the transfer, that were not added yet."""
        at, end = max(first_token, self._first_tokens[layer]), min(end_token, self.end_token)
        gaps = []
        for start, stop in self._intervals[layer]:
            if stop <= at:
                continue
            if start >= end:
                break
            if start > at:
                gaps.append((at, start))
            at = stop
        if at < end:
            gaps.append((at, end))
        return gaps

    def add(self, first_layer: int, end_layer: int, first_token: int, end_token: int) -> None:
        """Mark a rectangle. Raises ``OverlapError``, without changes, if a cell is already marked
        or outside."""
        if not self.holds(first_layer, end_layer, first_token, end_token):
            raise OverlapError(
                f"layers [{first_layer}, {end_layer}) tokens [{first_token}, {end_token}) lie "
                f"outside layers [0, {self.num_layers}) tokens up to {self.end_token} "
                f"from {self._firsts()}"
            )
        for layer in range(first_layer, end_layer):
            if self.missing(layer, first_token, end_token) != [(first_token, end_token)]:
                raise OverlapError(
                    f"layer {layer} tokens [{first_token}, {end_token}) arrived before, in part"
                )
        for layer in range(first_layer, end_layer):
            self._insert(self._intervals[layer], first_token, end_token)
        self.cells += (end_layer - first_layer) * (end_token - first_token)

    def _firsts(self) -> str:
        different = sorted(set(self._first_tokens))
        return " or ".join(map(str, different)) + (", by layer" if len(different) > 1 else "")

    @staticmethod
    def _insert(intervals: list[tuple[int, int]], first: int, end: int) -> None:
        at = bisect_right(intervals, (first, end))
        low, high = at, at
        if at > 0 and intervals[at - 1][1] == first:
            low, first = at - 1, intervals[at - 1][0]
        if at < len(intervals) and intervals[at][0] == end:
            high, end = at + 1, intervals[at][1]
        intervals[low:high] = [(first, end)]
