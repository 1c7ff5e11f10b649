"""Listening sockets, and the connections that arrive at them.

asyncio's own servers go on for as many rounds as the queue of the socket is long when no descriptor
is left, and log a traceback in each.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable

from ..errors import StartupError
from ..host_port import join_host_port
from .open_files import REMEDY

log = logging.getLogger("tandem.process")

# Accepted before the loop does something else.
BATCH = 16
# After an error, most likely for lack of descriptors.
PAUSE_SECONDS = 0.5
# One line about errors in this time.
QUIET_SECONDS = 10.0


def listen(host: str, port: int, backlog: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that listens; if ``shared``, beside other processes of this user, among which
    the system divides new connections. Raises ``OSError``."""
    listener = bind(host, port, shared=shared)
    try:
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that is bound, and gets no connections. Raises ``OSError``."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Of a name's addresses, that of IPv4, as everybody expects of localhost.
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    # With an explicit protocol, asyncio turns off Nagle's algorithm for accepted connections; it
    # would delay tokens by up to 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def http_port_error(host: str, port: int, error: OSError) -> StartupError:
    """What to tell whose HTTP port is taken."""
    return StartupError(
        f"cannot listen on {join_host_port(host, port)} for HTTP: {error.strerror}; choose "
        "another --host or --port"
    )


class Acceptor:
    """Accepts connections on a socket that listens, and hands them to ``take``."""

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket], None],
        what: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``what`` is the kind of the connections, for the log."""
        self._listener = listener
        self._take = take
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._pause: asyncio.TimerHandle | None = None
        self._told_at = -math.inf
        self._untold = 0

    def start(self) -> None:
        self._loop.add_reader(self._listener, self._readable)

    def stop(self) -> None:
        """Accept nothing more, and close the socket. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _readable(self) -> None:
        for _ in range(BATCH):
            if not self._accept():
                return

    def _accept(self) -> bool:
        """Take one connection; False if there is none, or no descriptor for it."""
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process has it, or it is gone
        except OSError as error:
            self._leave(PAUSE_SECONDS)
            self._tell(error)
            return False
        accepted.setblocking(False)
        self._take(accepted)
        return True

    def _leave(self, seconds: float) -> None:
        """Accept nothing for so long: the socket stays readable."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self.start)

    def _tell(self, error: OSError) -> None:
        now = self._clock()
        if now - self._told_at < QUIET_SECONDS:
            self._untold += 1
            return
        more = f" ({self._untold} more times in between)" if self._untold else ""
        self._told_at, self._untold = now, 0
        log.error("%s cannot be accepted: %s; %s%s", self._what, error.strerror, REMEDY, more)
