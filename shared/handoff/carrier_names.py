"""How the bytes of a frame get from one rank to another, by name."""

from __future__ import annotations

SHARED_MEMORY = "shared_memory"
TCP = "tcp"
BEST_FIRST = (SHARED_MEMORY, TCP)
AUTO = "auto"


def allowed(setting: str) -> str:
    """What ``--carrier`` allows, in the form of a greeting: all of them, or the one it names."""
    return ",".join(BEST_FIRST) if setting == AUTO else setting
