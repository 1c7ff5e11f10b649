"""CURVE on the sockets of the data plane: fresh keys, and a handler that admits announced keys.

A public key is only as trustworthy as the channel that delivered it, so keys travel over the
control plane alone, and only if that has TLS. Keys are text in Z85, 40 characters.
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
# CURVE's addition to each message, which counts towards MAXMSGSIZE.
OVERHEAD_BYTES = 64

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The keys of one start of a data plane. The secret never leaves the process."""

    public: str
    secret: str = field(repr=False)

    def serve(self, socket: Socket) -> None:
        """Accept only admitted dialers. Call before ``bind``."""
        socket.setsockopt_string(zmq.ZAP_DOMAIN, "tandem")
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)

    def dial(self, socket: Socket, server: str) -> None:
        """Connect only to the holder of the key ``server``. Call before ``connect``."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)


def fresh_keys() -> CurveKeys:
    """New keys. Raises ``StartupError`` if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise StartupError(
            "TLS on the control plane requires CURVE on the data plane, which this libzmq lacks; "
            "install pyzmq from a wheel"
        )
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def check_keys(keys: Iterable[str], ranks: int, owner: str) -> None:
    """Raise ``PeerRefusedError`` unless a node announces a key for each of ``ranks``, which is 0 if
    this node is open."""
    keys = list(keys)
    if len(keys) != ranks:
        raise PeerRefusedError(
            f"{owner} announces {len(keys)} CURVE keys, and {ranks} are expected; give both nodes "
            f"--tls-cert, or neither"
        )
    for key in keys:
        if _raw(key) is None:
            raise PeerRefusedError(f"{owner} announces the invalid key {key[:KEY_CHARACTERS]!r}")


class ZapHandler:
    """Authenticates dialers for libzmq (ZAP): by an announced key if the plane is locked, otherwise
    by the ``epoch`` of this process as the password.

    pyzmq's authenticators need an event loop or a thread; the data plane polls this beside its
    sockets instead. Create it before the sockets that it guards.
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
        """Admit only these dialers from now on; established connections stay."""
        self._admitted = frozenset(raw for key in keys if (raw := _raw(key)) is not None)

    def reply(self) -> None:
        """Reply to waiting requests, a bounded number."""
        for _ in range(CONTROL_BATCH):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            valid = self._is_valid(request[6:])
            self.refused += not valid
            status, text = (b"200", b"OK") if valid else (b"400", b"not announced")
            self.socket.send_multipart([_ZAP_VERSION, request[1], status, text, b"", b""])

    def _is_valid(self, proof: list[bytes]) -> bool:
        """Check a key if the plane is locked, else a user and password."""
        if self._locked:
            return len(proof) == 1 and proof[0] in self._admitted
        return compare_digest(b":".join(proof), b":".join(self._password))

    def close(self) -> None:
        self.socket.close(0)


def _raw(key: str) -> bytes | None:
    """The 32 bytes of a key in Z85; None for anything else."""
    if len(key) != KEY_CHARACTERS or not key.isascii():
        return None
    try:
        raw: bytes = z85.decode(key)
    except (KeyError, struct.error):  # an invalid character, or a number that is too large
        return None
    return raw
