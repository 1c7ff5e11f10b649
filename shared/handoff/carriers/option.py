"""The value of ``--carrier``: one name, several with commas, or ``auto``.

No imports of the handoff here: installs of the engine alone load this module.
"""

from __future__ import annotations

from ...errors import StartupError

AUTO = "auto"


def allows(setting: str, name: str, *, on_request: bool = False) -> bool:
    """True if a rank may use this carrier. ``on_request``: only if it is named."""
    if setting == AUTO:
        return not on_request
    return name in setting.split(",")


def not_possible(name: str, problem: str) -> StartupError:
    return StartupError(f"--carrier {name} is not possible here: {problem}")
