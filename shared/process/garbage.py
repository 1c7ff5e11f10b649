"""Garbage collection of a process that steps."""

from __future__ import annotations

import gc

# A row of a step is a few objects, none of them in cycles. By default, 700 of them start a
# collection.
_OBJECTS = 50_000


def collect_rarely() -> None:
    """Never look at what exists now again, since all of it stays, and at new objects rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
