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
class PendingLayer:
    """An announced layer; ``is_computed`` returns True once its KV is in the cache."""

    ready: LayerReady
    is_computed: Callable[[], bool]


class PendingLayers:
    """Announced layers, in the order of the engine's stream, in which they are also computed.
    Bounded by the layers of a step, since the head begins no step before the last one is over."""

    def __init__(self, on_computed: Callable[[LayerReady], None]) -> None:
        self._on_computed = on_computed
        self._pending: deque[PendingLayer] = deque()

    @property
    def any(self) -> bool:
        """True if a layer is still being computed."""
        return bool(self._pending)

    def add(self, layer: PendingLayer) -> None:
        """Take an announcement."""
        self._pending.append(layer)

    def release(self) -> None:
        """Pass on the layers that are computed by now."""
        while self._pending and self._pending[0].is_computed():
            self._on_computed(self._pending.popleft().ready)
