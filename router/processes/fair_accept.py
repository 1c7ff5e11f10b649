"""Connections of one port, spread evenly over the processes that listen on it.

All have the same socket. The kernel wakes any of them, and those that share a port by hashes
(``SO_REUSEPORT``) may get half as many connections again as others; but a stream stays for minutes.
So a process that has more connections than another one leaves a new one to it for a moment.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path

from ...shared.process.acceptor import Acceptor

# How long others have to take a connection. One of them may be busy, or stopped.
PATIENCE_SECONDS = 0.003
GONE = (1 << 32) - 1


class ConnectionCounts:
    """The numbers of connections of all processes, in a file that they map."""

    def __init__(self, path: Path, processes: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, 4 * processes)
            self._counts = memoryview(mmap.mmap(file, 4 * processes)).cast("I")
        finally:
            os.close(file)

    def set(self, process: int, count: int) -> None:
        self._counts[process] = count

    def gone(self, process: int) -> None:
        """Nobody waits for a process that does not run."""
        self._counts[process] = GONE

    def fewest(self) -> int:
        return min(self._counts)


class FairAccept(Acceptor):
    """Accepts connections for one process."""

    def __init__(
        self,
        listener: socket.socket,
        counts: ConnectionCounts,
        process: int,
        own: Callable[[], int],
        take: Callable[[socket.socket], None],
    ) -> None:
        """``own`` gives the number of connections of this process."""
        super().__init__(listener, take, "a connection")
        self._counts = counts
        self._process = process
        self._own = own
        self._waited = False

    def start(self) -> None:
        self.count()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._counts.gone(self._process)

    def count(self) -> None:
        """Tell the others how many connections this process has."""
        self._counts.set(self._process, self._own())

    def _readable(self) -> None:
        self.count()
        if not self._waited and self._own() > self._counts.fewest():
            self._waited = True
            self._leave(PATIENCE_SECONDS)
            return
        self._waited = False
        if self._accept():
            self.count()
