# mypy: ignore-errors
"""Agent programs installed by npm, and the project in which they run."""

from __future__ import annotations

import os
from pathlib import Path

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))
MODULES = Path(os.environ["TARGET_NODE_MODULES"])
NOTE = "the answer is 42"


def program(pattern: str) -> Path:
    """The binary that npm installed for this platform."""
    binaries = [
        path for path in MODULES.glob(pattern) if os.access(path, os.X_OK) and path.is_file()
    ]
    assert binaries, f"npm has installed no {pattern}"
    return min(binaries, key=lambda path: ("baseline" in str(path), "musl" in path.parts[-4]))
