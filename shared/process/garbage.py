"""Garbage collection of a long-running process, most of whose objects stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A row of a step is a few objects, none of them in cycles. By default, 700 of them start a
# collection.
_OBJECTS = 50_000


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Pause the garbage collector during the block, then exempt all existing objects from it.

    Otherwise it traverses the imported modules again and again, a fifth of a rank's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_rarely() -> None:
    """Never look at what exists now again, since all of it stays, and at new objects rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
