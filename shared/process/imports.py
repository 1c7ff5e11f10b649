"""Imports of a process that lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import in this block what the process keeps. The garbage collector would look through all of
    it again and again, which is a fifth of a rank's start, so it pauses, and leaves out everything
    that is there at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
