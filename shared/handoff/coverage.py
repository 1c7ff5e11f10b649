"""Which (layer, token) cells of a transfer have been handled, exactly."""

from __future__ import annotations

from bisect import bisect_right


class OverlapError(ValueError):
    """A cell was to be handled twice."""


class Coverage:
    """Disjoint token intervals for each layer; neighbours merge, so the lists stay short."""

    def __init__(self, num_layers: int, first_token: int, end_token: int) -> None:
        self.num_layers = num_layers
        self.first_token = first_token
        self.end_token = end_token
        self.cells = 0
        self._intervals: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]

    @property
    def total(self) -> int:
        return self.num_layers * (self.end_token - self.first_token)

    @property
    def complete(self) -> bool:
        return self.cells == self.total

    def holds(self, first_layer: int, end_layer: int, first_token: int, end_token: int) -> bool:
        """Whether the rectangle is not empty and lies within the transfer."""
        layers = 0 <= first_layer < end_layer <= self.num_layers
        return layers and self.first_token <= first_token < end_token <= self.end_token

    def missing(self, layer: int, first_token: int, end_token: int) -> list[tuple[int, int]]:
        """The parts of an interval, clipped to the transfer, that no one has added yet."""
        at, end = max(first_token, self.first_token), min(end_token, self.end_token)
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
        """Mark a rectangle; raises and changes nothing when any cell is marked or outside."""
        if not self.holds(first_layer, end_layer, first_token, end_token):
            raise OverlapError(
                f"layers [{first_layer}, {end_layer}) tokens [{first_token}, {end_token}) lie "
                f"outside layers [0, {self.num_layers}) "
                f"tokens [{self.first_token}, {self.end_token})"
            )
        for layer in range(first_layer, end_layer):
            if self.missing(layer, first_token, end_token) != [(first_token, end_token)]:
                raise OverlapError(
                    f"layer {layer} tokens [{first_token}, {end_token}) came in part before"
                )
        for layer in range(first_layer, end_layer):
            self._insert(self._intervals[layer], first_token, end_token)
        self.cells += (end_layer - first_layer) * (end_token - first_token)

    @staticmethod
    def _insert(intervals: list[tuple[int, int]], first: int, end: int) -> None:
        at = bisect_right(intervals, (first, end))
        low, high = at, at
        if at > 0 and intervals[at - 1][1] == first:
            low, first = at - 1, intervals[at - 1][0]
        if at < len(intervals) and intervals[at][0] == end:
            high, end = at + 1, intervals[at][1]
        intervals[low:high] = [(first, end)]
