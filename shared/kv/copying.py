"""Copies between a cache and frames of the handoff, which a GPU may not have finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...kernels.streams import Wait


class _Over:
    """A ``Wait`` for nothing."""

    def __call__(self) -> None:
        pass

    def is_over(self) -> bool:
        return True


@dataclass(slots=True)
class Copying:
    """A copy of a frame.

    After ``wait``, ``sums`` are the frame's row sums (``kernels/row_sums.py``), if they were
    computed on the way.
    """

    wait: Wait
    sums: Callable[[], bytes] | None = None


def finished(sums: Callable[[], bytes] | None = None) -> Copying:
    """A copy that is over."""
    return Copying(_Over(), sums)
