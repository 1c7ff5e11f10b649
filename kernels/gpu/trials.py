"""What all trials of kernels on a GPU have in common: a kernel that fails or errs is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("tandem.kernels")


def problem(trial: Callable[[], str]) -> str:
    """What a trial finds wrong, or the error that it ends with; empty if neither."""
    try:
        return trial()
    except Exception as error:  # Triton, and libraries behind torch, have their own for everything
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def passes(trial: Callable[[], str], otherwise: str) -> bool:
    """Return whether a trial finds nothing wrong; log what is, and what happens ``otherwise``."""
    if reason := problem(trial):
        log.warning("%s: %s", otherwise, reason)
        return False
    return True


def too_far(worst: float, limit: float, whose: str = "its") -> str:
    """What is wrong with results that are so far off; empty within the limit, which NaN is not."""
    return "" if worst < limit else f"{whose} results are {worst:g} off"
