"""The queue of commands from other threads to the data-plane thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator

from ...errors import OverloadedError, UnavailableError
from .messages import Command


class Commands:
    """A bounded queue that can be polled: between ``open`` and ``close``, ``socket`` is readable
    while a command waits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Command] = deque()
        # Ensures that commands queued before the end are still taken, and that none is queued after
        # it.
        self._putting = threading.Lock()
        self._over = False
        self._woken = False
        self._wake_in: socket.socket | None = None
        self.socket: socket.socket | None = None

    def open(self) -> None:
        self._wake_in, self.socket = socket.socketpair()
        self._wake_in.setblocking(False)
        self.socket.setblocking(False)

    def put(self, command: Command) -> None:
        """Queue a command; never waits.

        Raises OverloadedError when the queue is full, UnavailableError when the plane has ended.
        """
        with self._putting:
            if self._over:
                raise UnavailableError("the data plane has ended; it takes no more commands")
            if len(self._waiting) >= self._limit:
                raise OverloadedError(
                    f"{self._limit} commands wait for the data plane; it is stuck"
                )
            self._waiting.append(command)
        self.wake()

    def end(self) -> None:
        """Accept no more commands."""
        with self._putting:
            self._over = True

    def wake(self) -> None:
        # A race costs at most an extra byte, never a lost wake-up: the plane clears the flag before
        # it reads the queue.
        pair = self._wake_in
        if not self._woken and pair is not None:
            self._woken = True
            with contextlib.suppress(OSError):  # full or closed: the plane is awake
                pair.send(b"w")

    # ---- the data-plane thread ---------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor, readable while a command waits."""
        return -1 if self.socket is None else self.socket.fileno()

    def rest(self) -> None:
        """Discard wake-ups, before the commands are taken."""
        if self.socket is not None:
            with contextlib.suppress(BlockingIOError):
                self.socket.recv(4096)
        self._woken = False

    def take(self) -> Iterator[Command]:
        """Take the commands that wait now."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        for end in (self._wake_in, self.socket):
            if end is not None:
                end.close()
        self._wake_in = self.socket = None
