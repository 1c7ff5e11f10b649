"""The password of an open data plane: the epoch of the process that listens.

Epochs travel over the control plane, so a dialer that knows one has greeted there. The password
does not protect against an attacker who reads the network; CURVE does. It keeps out everyone else:
a connection without it ends in ZeroMQ's handshake, before it can send a message.
"""

from __future__ import annotations

import zmq

from .sockets import Socket

_USER = b"tandem"
_DOMAIN = "tandem"


def guard(socket: Socket) -> None:
    """Require the password, which a ``ZapHandler`` checks. Call before ``bind``."""
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.PLAIN_SERVER, 1)


def show(socket: Socket, epoch: int) -> None:
    """Present the password of the process with this epoch. Call before ``connect``."""
    user, password = credentials(epoch)
    socket.setsockopt(zmq.PLAIN_USERNAME, user)
    socket.setsockopt(zmq.PLAIN_PASSWORD, password)


def credentials(epoch: int) -> list[bytes]:
    return [_USER, b"%016x" % epoch]
