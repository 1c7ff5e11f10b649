"""Trials of GPU kernels: a kernel that raises or is wrong is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("tandem.kernels")


def problem(trial: Callable[[], str]) -> str:
    """The problem that a trial reports or raises; empty if there is none."""
    try:
        return trial()
    except Exception as error:  # Triton and libraries under torch raise errors of many types
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def passes(trial: Callable[[], str], otherwise: str) -> bool:
    """True if a trial succeeds; logs the problem and the consequence ``otherwise``."""
    if reason := problem(trial):
        log.warning("%s: %s", otherwise, reason)
        return False
    return True


def too_far(worst: float, limit: float, whose: str = "its") -> str:
    """The problem with results that are ``worst`` off; empty below the limit. NaN is a problem."""
    return "" if worst < limit else f"{whose} results are {worst:g} off"
