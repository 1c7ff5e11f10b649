"""The folder for files of a user's running processes."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import StartupError


def private_folders() -> Iterator[Path]:
    """Where the folder may be, best first; the first exists only in login sessions."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        yield Path(runtime) / "tandem"
    yield Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}"


def private_folder() -> Path:
    """The folder, which only this user can read, created on demand. Raises ``StartupError``."""
    for folder in private_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if is_private(folder) and os.access(folder, os.W_OK):
            return folder
    raise StartupError(
        f"{folder} is not a folder that only this user can read; set XDG_RUNTIME_DIR to one"
    )


def is_private(folder: Path) -> bool:
    """True for a real folder, not a link, that only this user can access."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    private = not stat.S_IMODE(info.st_mode) & 0o077
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and private
