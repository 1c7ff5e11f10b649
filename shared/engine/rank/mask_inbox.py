"""Token masks that the head computes while this rank computes their step."""

from __future__ import annotations

import queue
import time

from ..plan import TokenMasks

# The head needs milliseconds. Less than the time after which the head considers the rank stuck.
MASK_SECONDS = 30.0


class MaskInbox:
    """Passes masks from the reader thread to the main thread."""

    def __init__(self) -> None:
        # Bounded by the head, which sends one message for each step.
        self._masks: queue.SimpleQueue[TokenMasks] = queue.SimpleQueue()

    def put(self, masks: TokenMasks) -> None:
        self._masks.put(masks)

    def take(self, step: int) -> dict[int, bytes]:
        """Wait for the masks of a step; drop masks of earlier, failed steps.

        Raises ``TimeoutError``.
        """
        deadline = time.monotonic() + MASK_SECONDS
        while True:
            try:
                masks = self._masks.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"step {step} had no masks within {MASK_SECONDS:g} s") from None
            if masks.step == step:
                return masks.masks
