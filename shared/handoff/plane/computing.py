"""Layers that were announced while a GPU still computes them.

The engine's thread announces a layer when it has started it, and goes on to the next: waiting would
cost a prefill node the overlap. So it marks that place on its stream, and the data plane, which
asks the marks, lets an announcement through when its layer is really there. Packing waits for
nothing, least of all for layers after the one that it packs. On CPUs layers are announced when they
are computed, and nothing of this exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .messages import LayerReady


@dataclass(frozen=True, slots=True)
class Announced:
    """``is_computed`` says whether the layer is there."""

    ready: LayerReady
    is_computed: Callable[[], bool]


class Computing:
    """In the order of the engine's stream: what is computed first was announced first. As many as a
    step announces, since the head begins no step before the last is over."""

    def __init__(self, let_through: Callable[[LayerReady], None]) -> None:
        self._let_through = let_through
        self._announced: deque[Announced] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._announced)

    def add(self, announced: Announced) -> None:
        self._announced.append(announced)

    def let_through(self) -> None:
        """Pass on what is computed by now."""
        while self._announced and self._announced[0].is_computed():
            self._let_through(self._announced.popleft().ready)
