"""What an open data plane asks of whoever dials it: the epoch of the process, as a password.

Epochs travel over the control plane, so whoever knows it has greeted there. Against one who reads
the network it is no protection, which is what CURVE is for. Against everybody else it is: a
connection without it ends in ZeroMQ's handshake, before it can send a message.
"""

from __future__ import annotations

import zmq

from .sockets import Socket

_USER = b"tandem"
_DOMAIN = "tandem"


def guard(socket: Socket) -> None:
    """Before it binds: only dialers with the password get through; a ``Door`` knows it."""
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.PLAIN_SERVER, 1)


def show(socket: Socket, epoch: int) -> None:
    """Before it connects to the process of this epoch."""
    user, password = credentials(epoch)
    socket.setsockopt(zmq.PLAIN_USERNAME, user)
    socket.setsockopt(zmq.PLAIN_PASSWORD, password)


def credentials(epoch: int) -> list[bytes]:
    return [_USER, b"%016x" % epoch]
