"""Listening sockets and their connections.

When no descriptor is free, asyncio's own servers retry ``accept`` once for each place in the
socket's queue, and log a traceback each time.
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

# Connections accepted before the loop does something else.
BATCH = 16
# Pause after an error, most likely for lack of descriptors.
PAUSE_SECONDS = 0.5
# Errors are logged at most once in this time.
QUIET_SECONDS = 10.0


def listen(host: str, port: int, backlog: int, *, shared: bool = False) -> socket.socket:
    """A listening TCP socket. Raises ``OSError``.

    If ``shared``, other processes of this user may listen on the same port; the system divides new
    connections among them."""
    listener = bind(host, port, shared=shared)
    try:
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that is bound but does not listen yet. Raises ``OSError``."""
    addresses = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    # A name's IPv4 address comes first, as users expect of localhost.
    family, _, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
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
    """The error of a process that cannot listen on its HTTP port."""
    return StartupError(
        f"cannot listen on {join_host_port(host, port)} for HTTP: {error.strerror}; choose "
        "another --host or --port"
    )


class Acceptor:
    """Accepts connections on a listening socket, and passes them to ``take``."""

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket], None],
        what: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``what`` names a connection in the log."""
        self._listener = listener
        self._take = take
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._pause: asyncio.TimerHandle | None = None
        self._logged_at = -math.inf
        self._unlogged = 0

    def start(self) -> None:
        self._loop.add_reader(self._listener, self._readable)

    def stop(self) -> None:
        """Close the socket. Idempotent."""
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
        """Accept one connection; returns false if there is none, or no descriptor for it."""
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process has accepted it, or it is closed again
        except OSError as error:
            self._pause_reading(PAUSE_SECONDS)
            self._log(error)
            return False
        accepted.setblocking(False)
        self._take(accepted)
        return True

    def _pause_reading(self, seconds: float) -> None:
        """Ignore the socket, which stays readable, for a while."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self.start)

    def _log(self, error: OSError) -> None:
        now = self._clock()
        if now - self._logged_at < QUIET_SECONDS:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more times in between)" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        log.error("%s cannot be accepted: %s; %s%s", self._what, error.strerror, REMEDY, more)
