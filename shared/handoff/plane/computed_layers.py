"""Layers that were announced while a GPU still computes them.

The engine's thread announces a layer when it has launched it, and goes on to the next one: waiting
would lose the overlap. So each announcement comes with a mark on the engine's stream. A thread
sleeps in the GPU's driver until the mark is passed, then forwards the announcement, so that packing
does not wait for later layers. On CPUs, layers are announced when they are computed,
and this module is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from .device_waits import DeviceWaits
from .messages import LayerReady

log = logging.getLogger("tandem.handoff")


class ComputedLayers:
    """Announcements in the order of the engine's stream. Bounded by the layers of the steps in
    flight."""

    def __init__(
        self, mark: Callable[[], Callable[[], None]], submit: Callable[[LayerReady], None]
    ) -> None:
        """``mark`` marks the current point of the calling thread's computation. Its result waits
        until the GPU has passed that point, without holding the GIL."""
        self._mark = mark
        self._submit = submit
        self._waits = DeviceWaits("computed-layers")

    def announce(self, layers: Sequence[LayerReady]) -> None:
        """Submit ``layers`` once everything that this thread has launched is computed."""
        self._waits.put(self._mark(), partial(self._computed, layers))

    def _computed(self, layers: Sequence[LayerReady], failure: Exception | None) -> None:
        try:
            if failure is not None:
                raise failure
            for layer in layers:
                self._submit(layer)
        except Exception:  # the step fails too, or the plane has reported its end
            log.exception("layer %d was not announced", layers[0].first_layer)
