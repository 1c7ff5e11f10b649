"""The extent of a test run: a part of long campaigns and of combinations, or all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

FRACTIONS = (0.0, 0.1, 0.5, 0.9, 1.0)
# TANDEM_TEST_EXTENT=full runs every combination, and every fault at every fraction.
FULL = os.environ.get("TANDEM_TEST_EXTENT") == "full"
# How long faults are drawn, and from which seed.
STORM_SECONDS = float(os.environ.get("TANDEM_TEST_STORM_SECONDS", "6"))
STORM_SEED = int(os.environ.get("TANDEM_TEST_STORM_SEED", "1"))


def selected(always: Sequence[T], *, full: Sequence[T]) -> list[T]:
    """The cases of a test: in a short run those that between them take every path once."""
    return [*always, *full] if FULL else list(always)


def cases(faults: Iterable[str]) -> list[tuple[str, float]]:
    """Each fault with the part of a transfer at which it strikes. A short run has each fault once,
    and every part as often as any other."""
    if FULL:
        return [(fault, fraction) for fault in faults for fraction in FRACTIONS]
    return [(fault, FRACTIONS[number % len(FRACTIONS)]) for number, fault in enumerate(faults)]
