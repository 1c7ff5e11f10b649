"""The random number that tells one start of a process from the next."""

from __future__ import annotations

import secrets


def new_epoch() -> int:
    """Drawn once a process start, carried in every message; never 0, which means "unknown"."""
    return secrets.randbits(64) or 1
