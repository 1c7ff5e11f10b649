"""A listening port of a data plane, with a limit of unknown connections.

ZeroMQ accepts any number of connections. One that sends nothing uses a descriptor and some memory
until its handshake times out; without free descriptors, ZeroMQ's thread retries in a busy loop.
Unbinding would also end the established connections. So the listening socket is created here, and
while too many connections have not greeted, a packet filter on it drops new ones, which retry after
a second, as after a lost packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ....host_port import join_host_port
from .sockets import CONTROL_BATCH, Socket

# The limit of connections that have not greeted. Each ends when its handshake times out.
MAX_UNKNOWN = 256
# The pause after a failed accept, most likely for lack of descriptors.
PAUSE_SECONDS = 1.0
_QUEUE = 128
# Linux's constants, which Python does not define.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# A program of one instruction: return 0, that is, keep no byte of a packet.
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_FILTER = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED


class ListeningPort:
    """A bound socket, and counts of its connections."""

    def __init__(self, bound: Socket) -> None:
        self._socket = bound
        self.monitor = bound.get_monitor_socket(_EVENTS)
        self.accepted = 0
        self._open = 0
        self._port: socket.socket | None = None
        self.admits = True
        self._closed_until = float("-inf")

    def listen(self, host: str, port: int, send_buffer: int = 0) -> str:
        """Listen, and return the endpoint. ``send_buffer``: bytes per connection; 0: the system's
        default. Raises ``OSError``."""
        family, _, _, _, address = socket.getaddrinfo(
            None if host == "*" else host,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        self._port = socket.socket(family, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if send_buffer:
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self._port.bind(address)
        self._port.listen(_QUEUE)
        if family == socket.AF_INET6:
            self._socket.setsockopt(zmq.IPV6, 1)
        endpoint = f"tcp://{join_host_port(str(address[0]), self._port.getsockname()[1])}"
        self._socket.setsockopt(zmq.USE_FD, os.dup(self._port.fileno()))  # ZeroMQ closes it
        self._socket.bind(endpoint)
        return endpoint

    def listen_in_folder(self, endpoint: str) -> str:
        """Listen on a Unix socket, guarded by the folder's permissions. Raises ``ZMQError``."""
        self._socket.bind(endpoint)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def update(self, peers: int, now: float) -> None:
        """Count connections, of which ``peers`` have greeted, and open or close the port."""
        for _ in range(CONTROL_BATCH):
            try:
                event: Any = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.accepted += 1
                self._open += 1
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._open -= 1
            else:
                self._closed_until = now + PAUSE_SECONDS
        if self._port is None:
            return
        unknown = self._open - peers
        full = unknown > (MAX_UNKNOWN if self.admits else MAX_UNKNOWN // 2)
        admits = not full and now >= self._closed_until
        if admits != self.admits:
            self.admits = admits
            with contextlib.suppress(OSError):  # a kernel without packet filters: no limit
                if admits:
                    self._port.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                else:
                    self._port.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(0)
        self.monitor.close(0)
        if self._port is not None:
            self._port.close()
