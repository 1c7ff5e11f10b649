"""CURVE on the sockets of the data plane: fresh keys, and a door that opens to announced ones.

A public key is worth what the way is worth on which it came, so keys travel over the control plane
alone, and only when that has TLS. Keys are text in Z85, 40 characters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from hmac import compare_digest

import zmq
from zmq.utils import z85

from ....errors import PeerRefusedError, StartupError
from . import password
from .sockets import CONTROL_BATCH, Socket

KEY_CHARACTERS = 40
# What CURVE adds to a message; ZeroMQ compares the sum with MAXMSGSIZE.
OVERHEAD_BYTES = 64

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One start of one data plane; the secret never leaves its process."""

    public: str
    secret: str = field(repr=False)

    def serve(self, socket: Socket) -> None:
        """Before it binds: only dialers that the door admits get through."""
        socket.setsockopt_string(zmq.ZAP_DOMAIN, "tandem")
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)

    def dial(self, socket: Socket, server: str) -> None:
        """Before it connects: only the holder of this key answers."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)


def fresh_keys() -> CurveKeys:
    """Raises ``StartupError`` when ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise StartupError(
            "TLS on the control plane asks for CURVE on the data plane, which this libzmq lacks; "
            "install pyzmq from a wheel"
        )
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def check_keys(keys: Iterable[str], ranks: int, whose: str) -> None:
    """Raise ``PeerRefusedError`` unless a node announces so many keys; 0: this node is open."""
    keys = list(keys)
    if len(keys) != ranks:
        raise PeerRefusedError(
            f"{whose} announces {len(keys)} CURVE keys, and {ranks} are expected; give both nodes "
            f"--tls-cert, or neither"
        )
    for key in keys:
        if _raw(key) is None:
            raise PeerRefusedError(f"{whose} announces {key[:KEY_CHARACTERS]!r}, which is no key")


class Door:
    """Answers libzmq's question, by ZAP, whether a dialer may come in: with a key that was
    announced where the plane is locked, else with the ``epoch`` of this process as a password.

    pyzmq's authenticators need an event loop or a thread of their own; the data plane has one
    thread, and polls this beside its sockets. Bound before the sockets that it guards.
    """

    def __init__(self, context: zmq.Context[Socket], *, locked: bool, epoch: int) -> None:
        self.refused = 0
        self._locked = locked
        self._password = password.credentials(epoch)
        self._admitted: frozenset[bytes] = frozenset()
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def admit(self, keys: Iterable[str]) -> None:
        """These dialers from now on, and no others; connections that stand are not touched."""
        self._admitted = frozenset(raw for key in keys if (raw := _raw(key)) is not None)

    def answer(self) -> None:
        """Answer a bounded number of those who wait."""
        for _ in range(CONTROL_BATCH):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = self._knows(question[6:])
            self.refused += not known
            status, text = (b"200", b"OK") if known else (b"400", b"not announced")
            self.socket.send_multipart([_ZAP_VERSION, question[1], status, text, b"", b""])

    def _knows(self, shown: list[bytes]) -> bool:
        """The sockets decide which of the two is asked for."""
        if self._locked:
            return len(shown) == 1 and shown[0] in self._admitted
        return compare_digest(b":".join(shown), b":".join(self._password))

    def close(self) -> None:
        self.socket.close(0)


def _raw(key: str) -> bytes | None:
    """The 32 bytes of a key in Z85; ``None`` for anything else."""
    if len(key) != KEY_CHARACTERS or not key.isascii():
        return None
    try:
        raw: bytes = z85.decode(key)
    except (KeyError, struct.error):  # a character that is none of the 85, or a number too large
        return None
    return raw
