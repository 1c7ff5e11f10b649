"""Layers that were announced while a GPU still computes them.

The engine's thread announces a layer when it has started it, and goes on to the next: waiting would
cost a prefill node the overlap. So it records a mark on its stream with each announcement, and a
thread of this module, which sleeps in the GPU's driver, passes the announcement on when its layer
is computed. Packing does not wait for later layers. On CPUs a layer is announced when it is
computed, and this module is not used.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from .messages import LayerReady

log = logging.getLogger("tandem.handoff")


class ComputedLayers:
    """Announcements in the order of the engine's stream, in which they are also computed. Bounded
    by the layers of the steps that are under way."""

    def __init__(
        self, mark: Callable[[], Callable[[], None]], submit: Callable[[LayerReady], None]
    ) -> None:
        """``mark`` marks a point in the calling thread's computation. Its result waits until the
        point has been passed, without Python's lock."""
        self._mark = mark
        self._submit = submit
        self._announced: queue.SimpleQueue[tuple[Callable[[], None], Sequence[LayerReady]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="computed-layers", daemon=True).start()

    def announce(self, layers: Sequence[LayerReady]) -> None:
        """Submit ``layers`` once what this thread has started by now is computed."""
        self._announced.put((self._mark(), layers))

    def _run(self) -> None:
        while True:
            wait, layers = self._announced.get()
            try:
                wait()
                for layer in layers:
                    self._submit(layer)
            except Exception:  # the step fails too, or the plane has reported its end
                log.exception("layer %d was not announced", layers[0].first_layer)
