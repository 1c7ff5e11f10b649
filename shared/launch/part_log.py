"""The log file of a part: what the process writes to its terminal, in bounded space."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

# A longer log becomes NAME.log.1, in place of the one before.
MAX_BYTES = 64 << 20
# More than a line that a part ends with.
END_BYTES = 64 << 10


class PartLog:
    """A log that a child process writes. It cannot be told to open another file, so a long log is
    copied and emptied, as ``copytruncate`` of logrotate does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._earlier = path.with_name(f"{path.name}.1")

    def open(self) -> BinaryIO:
        """The file for a process to append to, so that it goes on at the start of an emptied one.
        Raises ``OSError``."""
        return open(self.path, "ab")

    def shorten(self) -> None:
        """Set the lines aside if there are many. What is written between the copy and the end of
        this call is lost."""
        # On a full disk it is tried again.
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > MAX_BYTES:
                shutil.copyfile(self.path, self._earlier)
                os.truncate(self.path, 0)

    def last_line(self) -> str:
        """The last line, where a part that cannot start gives its reason; empty without one."""
        end = b""
        with contextlib.suppress(OSError), open(self.path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - END_BYTES))
            end = log.read()
        lines = end.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
