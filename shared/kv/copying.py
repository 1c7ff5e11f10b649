"""Copies between a cache and frames of the handoff, which a GPU may not have finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Copying:
    """A copy of a frame.

    ``wait`` sleeps until the copy is over, without holding the GIL; any thread may call it, any
    number of times. ``sums`` are then the frame's row sums (``kernels/row_sums.py``), if they were
    computed on the way. ``is_over`` is only set for copies that need no waiting, and by whoever has
    waited.
    """

    wait: Callable[[], None]
    sums: Callable[[], bytes] | None = None
    is_over: bool = False


def finished(sums: Callable[[], bytes] | None = None) -> Copying:
    """A copy that is over."""
    return Copying(lambda: None, sums, is_over=True)
