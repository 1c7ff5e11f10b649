"""CPU cores of each rank."""

from __future__ import annotations

import os


def share_of_cores(ranks: int) -> int:
    """Cores that this process may use, divided among ``ranks``; at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (usable or 1) // ranks)
