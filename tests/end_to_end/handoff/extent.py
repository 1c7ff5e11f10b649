"""The extent of a campaign: a part that fits into every test run, or all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable

FRACTIONS = (0.0, 0.1, 0.5, 0.9, 1.0)
# TANDEM_TEST_CAMPAIGN=full runs every fault at every fraction.
FULL = os.environ.get("TANDEM_TEST_CAMPAIGN") == "full"
# How long faults are drawn, and from which seed.
STORM_SECONDS = float(os.environ.get("TANDEM_TEST_STORM_SECONDS", "12"))
STORM_SEED = int(os.environ.get("TANDEM_TEST_STORM_SEED", "1"))


def cases(faults: Iterable[str]) -> list[tuple[str, float]]:
    """Each fault with the part of a transfer at which it strikes. A short run has each fault once,
    and every part as often as any other."""
    if FULL:
        return [(fault, fraction) for fault in faults for fraction in FRACTIONS]
    return [(fault, FRACTIONS[number % len(FRACTIONS)]) for number, fault in enumerate(faults)]
