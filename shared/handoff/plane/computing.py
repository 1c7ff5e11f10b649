"""Layers that were announced while a GPU still computes them.

The engine's thread announces a layer when it has started it, and goes on to the next: waiting would
cost a prefill node the overlap. So it records a mark on its stream with each announcement, and the
data plane, which polls the marks, passes an announcement on when its layer is computed. Packing
does not wait for later layers. On CPUs a layer is announced when it is computed, and this module is
not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .messages import LayerReady


@dataclass(frozen=True, slots=True)
class Announced:
    """An announced layer; ``is_computed`` returns True once it is there."""

    ready: LayerReady
    is_computed: Callable[[], bool]


class Computing:
    """Announced layers, in the order of the engine's stream, in which they are also computed.
    Bounded by the layers of a step, since the head begins no step before the last one is over."""

    def __init__(self, let_through: Callable[[LayerReady], None]) -> None:
        self._let_through = let_through
        self._announced: deque[Announced] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._announced)

    def add(self, announced: Announced) -> None:
        self._announced.append(announced)

    def let_through(self) -> None:
        """Pass on the layers that are computed by now."""
        while self._announced and self._announced[0].is_computed():
            self._let_through(self._announced.popleft().ready)
