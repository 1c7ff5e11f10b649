"""The random number that identifies one start of a process."""

from __future__ import annotations

import secrets


def new_epoch() -> int:
    """A new epoch, drawn once per start and carried in every message; never 0, which means
    "unknown"."""
    return secrets.randbits(64) or 1
