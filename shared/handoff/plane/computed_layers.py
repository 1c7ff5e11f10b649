"""Layers that were announced while a GPU still computes them.

The engine's thread announces a layer when it has launched it, and goes on to the next one: waiting
would lose the overlap. So announcements come with marks on the engine's stream. A thread sleeps in
the GPU's driver until a mark is passed, then forwards what came with it, so that packing does not
wait for later layers. Layers share a mark in pairs, since each wake of that thread and of the data
plane takes Python's lock from the engine's thread. The last one has a mark of its own, and so has
the one before if their number is even: a decode node waits for these. On CPUs, layers are announced
when they are computed, and this module is not used.
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
        self,
        mark: Callable[[], Callable[[], None]],
        submit: Callable[[LayerReady], None],
        num_layers: int,
    ) -> None:
        """``mark`` marks the current point of the calling thread's computation. Its result waits
        until the GPU has passed that point, without holding the GIL."""
        self._mark = mark
        self._submit = submit
        self._last = num_layers - 1
        self._first_of_pair: list[LayerReady] = []
        self._waits = DeviceWaits("computed-layers")

    def announce(self, layers: Sequence[LayerReady]) -> None:
        """Submit ``layers``, which are one layer of some transfers, once everything that this
        thread has launched is computed, or with the next layer."""
        layer = layers[0].first_layer
        # A lower or equal layer is of a new step: the one before has failed.
        before = [each for each in self._first_of_pair if each.first_layer < layer]
        pair = [*before, *layers]
        self._first_of_pair = pair if layer % 2 == 0 and layer + 1 < self._last else []
        if not self._first_of_pair:
            self._waits.put(self._mark(), partial(self._computed, pair))

    def _computed(self, layers: Sequence[LayerReady], failure: Exception | None) -> None:
        try:
            if failure is not None:
                raise failure
            for layer in layers:
                self._submit(layer)
        except Exception:  # the step fails too, or the plane has reported its end
            log.exception("layer %d was not announced", layers[0].first_layer)
