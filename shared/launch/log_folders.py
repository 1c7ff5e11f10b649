"""Log folders: one for each start of a cluster, in ``--log-dir``.

Otherwise two clusters started in one folder would write to the same files. A launcher holds a lock
on its folder as long as it lives, so that no other launcher removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import StartupError

# Number of folders to keep, with the new one; those of running clusters are always kept.
MAX_FOLDERS = 10
LATEST = "latest"
_NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")


@contextlib.contextmanager
def log_folder_of_start(parent: Path) -> Iterator[Path]:
    """Create a folder in ``parent``, point the link ``latest`` to it, and remove old folders.

    Raises ``StartupError`` if it cannot be created.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = _create(parent)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(
            f"cannot write logs to {parent}: {error.strerror}; see --log-dir"
        ) from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _link(parent, folder.name)
        _prune(parent)
        yield folder
    finally:
        os.close(lock)


def _create(parent: Path) -> Path:
    """Create a folder named after the time and the process, whose ids are often equal in
    containers."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            folder = parent / f"{name}{suffix}"
            folder.mkdir()
            return folder
    raise FileExistsError(0, f"{name} to {name}-99 exist", str(parent))


def _link(parent: Path, name: str) -> None:
    link = parent / f".{LATEST}-{name}"
    # Fails on a file system without links, or if a user has a folder with the link's name.
    with contextlib.suppress(OSError):
        link.symlink_to(name)
        try:
            link.replace(parent / LATEST)
        except OSError:
            link.unlink()
            raise


def _prune(parent: Path) -> None:
    folders = [entry for entry in parent.iterdir() if _NAME.fullmatch(entry.name)]
    for folder in sorted(folders)[:-MAX_FOLDERS]:
        if not folder.is_symlink() and not _is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    """True if a live launcher writes to this folder, or if that is unknown."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
