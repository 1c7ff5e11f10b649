"""The sockets of a connection between two ranks, for both ends.

The sending rank binds two ROUTERs (bulk, control), the receiving rank connects a DEALER pair for
each sender, so only prefill nodes need ports that others can reach. A connection is never silently
re-established (``RECONNECT_IVL=-1``), because ZeroMQ would replay queued frames to any process that
listens there now. The dialer notices at once when a connection ends. Silent connections are
detected by pings on the control socket: after ``silence_seconds`` of silence in either direction,
the peer is lost.

The ranks agree on the carrier of a connection in their greetings (``ranks.py``). A carrier that
does not send frames over the bulk sockets leaves them idle, or announces frames there.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...wire import frame, greeting
from ...wire.frame import FrameError, Header, Kind
from ...wire.greeting import PeerKey

Socket: TypeAlias = "zmq.Socket[bytes]"

MAX_CONTROL_MESSAGE = greeting.MAX_GREETING_BYTES
CONTROL_BATCH = 256
BULK_BUFFER_BYTES = 4 << 20
# The limit of one data plane. A dialed connection takes six, with its monitors, so the library's
# default of 1023 would be enough for 170 peer ranks.
MAX_SOCKETS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A dead peer is detected after ``silence_seconds`` plus one tick of the loop."""

    ping_seconds: float = 0.5
    silence_seconds: float = 2.0

    @property
    def zmq_heartbeat_ms(self) -> int:
        return int(self.silence_seconds * 500)


def open_socket(context: zmq.Context[Socket], kind: int, limit: int, timing: Timing) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    socket.setsockopt(zmq.HEARTBEAT_IVL, timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2 * timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * timing.zmq_heartbeat_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def watched_socket(
    context: zmq.Context[Socket], limit: int, timing: Timing
) -> tuple[Socket, Socket]:
    """A socket to dial with, and its watch: a socket that becomes readable when the connection has
    ended, has failed, or was rejected. ``unwatch`` closes both.

    Raises ``ZMQError`` if this process is out of sockets or descriptors.
    """
    socket = open_socket(context, zmq.DEALER, limit, timing)
    endings = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    try:
        watch = socket.get_monitor_socket(endings, f"inproc://watch-{secrets.token_hex(8)}")
    except zmq.ZMQError:
        socket.disable_monitor()
        socket.close(0)
        raise
    return socket, watch


def unwatch(socket: Socket, watch: Socket) -> None:
    """Close both, in the only safe order: a socket that reports to a closed watch blocks ZeroMQ's
    I/O thread forever."""
    socket.disable_monitor()
    watch.close(0)
    socket.close(0)


def was_rejected(watch: Socket) -> bool:
    """True if the other side rejected the connection. Call once the watch is readable."""
    with contextlib.suppress(zmq.Again):
        while True:
            event: Any = parse_monitor_message(watch.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return True
    return False


def is_readable(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def to_peer(kind: Kind, mine: int, peer: PeerKey, payload: bytes = b"") -> bytes:
    """A frame about the connection itself."""
    header = Header(kind=kind, sender_epoch=mine, receiver_epoch=peer.epoch)
    return frame.encode(header, payload)


def about_connection(
    message: bytes, peer: PeerKey, mine: int, *kinds: Kind
) -> tuple[Kind, memoryview] | None:
    """Kind and payload of a valid frame of these kinds, between these two epochs; else ``None``."""
    if frame.kind_byte(message) not in kinds:  # most are about transfers, and are decoded later
        return None
    try:
        header, payload = frame.decode(message, frame.MAX_REASON_BYTES)
    except FrameError:
        return None
    is_ours = (header.sender_epoch, header.receiver_epoch) == (peer.epoch, mine)
    return (header.kind, payload) if is_ours and header.kind in kinds else None


def drain(router: Socket) -> list[tuple[bytes, bytes]]:
    """Take a bounded number of waiting messages of a ROUTER; drop malformed ones."""
    messages = []
    for _ in range(CONTROL_BATCH):
        try:
            parts = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if len(parts) == 2:
            messages.append((parts[0], parts[1]))
    return messages
