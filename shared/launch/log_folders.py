"""The folders of logs: one for each start of a cluster, under that of ``--log-dir``.

Two clusters that are started in one folder would otherwise write into the same files. A launcher
holds a lock on its folder as long as it lives, so that no other removes it.
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

# Folders of earlier starts that are kept, with the new one; those of running clusters always are.
KEPT = 10
LATEST = "latest"
_NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")


@contextlib.contextmanager
def log_folder_of_start(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``, to which the link ``latest`` then points. Old ones are removed.

    Raises ``StartupError`` if it cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = _make(parent)
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(
            f"cannot write logs to {parent}: {error.strerror}; see --log-dir"
        ) from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _link(parent, folder.name)
        _prune(parent)
        yield folder
    finally:
        os.close(held)


def _make(parent: Path) -> Path:
    """Named after the time and the process: in containers, only the time differs."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for more in ("", *(f"-{number}" for number in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            folder = parent / f"{name}{more}"
            folder.mkdir()
            return folder
    raise FileExistsError(0, f"{name} to {name}-99 exist", str(parent))


def _link(parent: Path, name: str) -> None:
    link = parent / f".{LATEST}-{name}"
    # A file system without links, or a folder that a user has named so.
    with contextlib.suppress(OSError):
        link.symlink_to(name)
        try:
            link.replace(parent / LATEST)
        except OSError:
            link.unlink()
            raise


def _prune(parent: Path) -> None:
    started = [entry for entry in parent.iterdir() if _NAME.fullmatch(entry.name)]
    for folder in sorted(started)[:-KEPT]:
        if not folder.is_symlink() and not _held(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _held(folder: Path) -> bool:
    """True if a live launcher writes to this folder, or if that cannot be known."""
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
