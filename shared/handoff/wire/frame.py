"""One frame of the data plane: a fixed header, then raw bytes.

No length from the wire causes an allocation: frames are parsed out of messages that the socket has
already bounded (``MAXMSGSIZE``), and the length in the header must equal the payload's. The
checksum covers header and payload, so it detects corrupt token ranges as well as tensors.

::

    data   sender -> receiver   KV of layers x tokens x heads, canonical layout
    fin    sender -> receiver   all data sent: count of frames, bytes, digest over their checksums
    ack    receiver -> sender   bytes scattered so far; ``sequence`` is the next one expected
    nack   receiver -> sender   this attempt failed here: reason
    abort  both                 unknown, stale or cancelled transfer: reason
    ping, pong                  liveness of a connection; names no transfer
    choice  receiver -> sender  the carrier of the connection; names no transfer
    release receiver -> sender  the oldest loan has been read; names no transfer
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import xxhash

from ...causes import Cause
from ...errors import TransferError
from .buffer import Buffer

VERSION = 1
MAGIC = b"TDMF"
MAX_REASON_BYTES = 512

# magic, version, kind, flags, transfer, attempt, sequence, sender epoch, receiver epoch,
# layers, tokens, heads, payload length; then the checksum.
_FIELDS = struct.Struct("<4sBBHQIIQQHHIIHHI")
_KIND_AT = 5
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

_ACK = struct.Struct("<Q")
_FIN = struct.Struct("<QQQ")


class FrameError(TransferError):
    """A message is not a valid frame of this protocol."""

    cause = Cause.FRAME


class ChecksumError(FrameError):
    """A frame was corrupted on its way."""

    cause = Cause.CHECKSUM


class Kind(IntEnum):
    DATA = 1
    ACK = 2
    NACK = 3
    FIN = 4
    ABORT = 5
    PING = 6
    PONG = 7
    CHOICE = 8
    RELEASE = 9


class Header(NamedTuple):
    """The fixed part of a frame. Ranges are half open; control frames leave them empty."""

    kind: Kind
    sender_epoch: int
    receiver_epoch: int
    transfer_id: int = 0
    attempt: int = 0
    sequence: int = 0
    first_layer: int = 0
    end_layer: int = 0
    first_token: int = 0
    end_token: int = 0
    first_head: int = 0
    end_head: int = 0


@dataclass(frozen=True, slots=True)
class Fin:
    """The sender's account of one attempt."""

    count: int
    total_bytes: int
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFrame:
    """A frame with its header in host memory and its payload in a device's memory. ``sums``
    computes the input of its checksum there (see ``Device``)."""

    head: memoryview
    payload: Buffer
    sums: Callable[[Buffer], bytes]

    def __len__(self) -> int:
        return len(self.head) + len(self.payload)


Message: TypeAlias = memoryview | bytes | DeviceFrame


def parts_of(message: Message) -> tuple[memoryview, Buffer]:
    """Header and payload of a message; the header of an invalid one may be too short."""
    if isinstance(message, DeviceFrame):
        return message.head, message.payload
    view = memoryview(message).cast("B")
    return view[:HEADER_BYTES], view[HEADER_BYTES:]


def seal(message: Message, header: Header) -> int:
    """Write the header of a message that has its payload; returns the checksum."""
    head, payload = parts_of(message)
    _FIELDS.pack_into(
        head,
        0,
        MAGIC,
        VERSION,
        header.kind,
        0,
        header.transfer_id,
        header.attempt,
        header.sequence,
        header.sender_epoch,
        header.receiver_epoch,
        header.first_layer,
        header.end_layer,
        header.first_token,
        header.end_token,
        header.first_head,
        header.end_head,
        len(payload),
    )
    checksum = checksum_of(message)
    _CHECKSUM.pack_into(head, _FIELDS.size, checksum)
    return checksum


def encode(header: Header, payload: bytes = b"") -> bytes:
    """A whole small frame."""
    buffer = bytearray(HEADER_BYTES + len(payload))
    buffer[HEADER_BYTES:] = payload
    seal(memoryview(buffer), header)
    return bytes(buffer)


def parse(message: Message, max_payload: int) -> tuple[Header, Buffer]:
    """Header and payload of a message, structurally valid but not yet checked for corruption."""
    head, payload = parts_of(message)
    if len(head) < HEADER_BYTES:
        raise FrameError(f"{len(head)} bytes are too few for a frame: a header has {HEADER_BYTES}")
    (
        magic, version, kind, flags, transfer_id, attempt, sequence, sender_epoch, receiver_epoch,
        first_layer, end_layer, first_token, end_token, first_head, end_head, length,
    ) = _FIELDS.unpack_from(head)  # fmt: skip
    if magic != MAGIC:
        raise FrameError(f"this message begins with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"frame version {version}, not {VERSION}")
    if flags:
        raise FrameError(f"frame flags {flags:#x}; none is defined in version {VERSION}")
    if length > max_payload:
        raise FrameError(f"payload of {length} bytes; the limit is {max_payload}")
    if length != len(payload):
        raise FrameError(f"the header says {length} payload bytes, but there are {len(payload)}")
    header = Header(
        kind=_kind(kind),
        transfer_id=transfer_id,
        attempt=attempt,
        sequence=sequence,
        sender_epoch=sender_epoch,
        receiver_epoch=receiver_epoch,
        first_layer=first_layer,
        end_layer=end_layer,
        first_token=first_token,
        end_token=end_token,
        first_head=first_head,
        end_head=end_head,
    )
    _check_shape(header, length)
    return header, payload


def kind_byte(message: bytes) -> int:
    """The kind that a message claims, before anything is checked; 0 if it is too short."""
    return message[_KIND_AT] if len(message) > _KIND_AT else 0


def verify(message: Message) -> int:
    """The checksum of a parsed message. Raises ``ChecksumError`` if the bytes do not match it."""
    (stated,) = _CHECKSUM.unpack_from(parts_of(message)[0], _FIELDS.size)
    actual = checksum_of(message)
    if stated != actual:
        raise ChecksumError(f"checksum {actual:#018x}, but the frame says {stated:#018x}")
    return int(stated)


def decode(message: memoryview | bytes, max_payload: int) -> tuple[Header, Buffer]:
    """Parse and verify."""
    parsed = parse(message, max_payload)
    verify(message)
    return parsed


def checksum_of(message: Message) -> int:
    """xxh3 of the payload, or of a device's sums of it, seeded with xxh3 of the header's fields."""
    head, payload = parts_of(message)
    seed = xxhash.xxh3_64_intdigest(head[: _FIELDS.size])
    data = message.sums(payload) if isinstance(message, DeviceFrame) else payload
    return xxhash.xxh3_64_intdigest(data, seed)


class Digest:
    """A hash over the checksums of an attempt's data frames, in order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, checksum: int) -> None:
        self._hash.update(_CHECKSUM.pack(checksum))

    @property
    def value(self) -> int:
        return self._hash.intdigest()


def ack_payload(received_bytes: int) -> bytes:
    return _ACK.pack(received_bytes)


def read_ack(payload: memoryview) -> int:
    (received_bytes,) = _ACK.unpack(payload)
    return int(received_bytes)


def fin_payload(fin: Fin) -> bytes:
    return _FIN.pack(fin.count, fin.total_bytes, fin.digest)


def read_fin(payload: memoryview) -> Fin:
    return Fin(*_FIN.unpack(payload))


def reason_payload(reason: str) -> bytes:
    return reason.encode()[:MAX_REASON_BYTES]


def read_reason(payload: memoryview) -> str:
    return printable(bytes(payload))


def printable(text: bytes) -> str:
    """Text from a peer, made safe to log."""
    return "".join(c if c.isprintable() else "?" for c in text.decode("utf-8", "replace"))


def _kind(value: int) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise FrameError(f"frame type {value} is not one of 1 to {len(Kind)}") from None


_PAYLOAD_BYTES = {
    Kind.ACK: (_ACK.size, _ACK.size),
    Kind.FIN: (_FIN.size, _FIN.size),
    Kind.NACK: (0, MAX_REASON_BYTES),
    Kind.ABORT: (0, MAX_REASON_BYTES),
    Kind.PING: (0, 0),
    Kind.PONG: (0, 0),
    Kind.CHOICE: (1, MAX_REASON_BYTES),
    Kind.RELEASE: (0, 0),
}


def _check_shape(header: Header, length: int) -> None:
    """Raise ``FrameError`` unless a frame's ranges and length fit its kind."""
    ranges = (
        ("layers", header.first_layer, header.end_layer),
        ("tokens", header.first_token, header.end_token),
        ("heads", header.first_head, header.end_head),
    )
    if header.kind is Kind.DATA:
        for name, first, end in ranges:
            if first >= end:
                raise FrameError(f"data frame with empty {name} [{first}, {end})")
        if not length:
            raise FrameError("data frame without payload")
        return
    if any(first or end for _, first, end in ranges):
        raise FrameError(f"{header.kind.name.lower()} frame with ranges")
    low, high = _PAYLOAD_BYTES[header.kind]
    if not low <= length <= high:
        name = header.kind.name.lower()
        raise FrameError(f"{name} frame with {length} payload bytes, not {low} to {high}")
