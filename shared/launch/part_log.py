"""The log file of a part: its standard output and error, in bounded space."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

# A longer log is moved to NAME.log.1, replacing it.
MAX_BYTES = 64 << 20
# Bytes at the end that have the last line.
END_BYTES = 64 << 10


class PartLog:
    """A log that a child process writes. The process keeps the file open, so a long log is copied
    and emptied, like logrotate's ``copytruncate``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._earlier = path.with_name(f"{path.name}.1")

    def open(self) -> BinaryIO:
        """The file in append mode, so that the process continues at the start after it is emptied.
        Raises ``OSError``."""
        return open(self.path, "ab")

    def shorten(self) -> None:
        """Move the lines aside if there are many. Lines written during this call may be lost."""
        # On a full disk the next call tries again.
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > MAX_BYTES:
                shutil.copyfile(self.path, self._earlier)
                os.truncate(self.path, 0)

    def last_line(self) -> str:
        """The last line, which is the reason if a part could not start; empty without one."""
        end = b""
        with contextlib.suppress(OSError), open(self.path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - END_BYTES))
            end = log.read()
        lines = end.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
