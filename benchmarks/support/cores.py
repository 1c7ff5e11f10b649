"""The cores that a benchmark runs on. Imports nothing that a machine for GPU runs may lack."""

from __future__ import annotations

import os


def two_cores() -> list[int]:
    """Two of the cores available to this process."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores")
    return cores
