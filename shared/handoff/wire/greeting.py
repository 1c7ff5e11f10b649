"""The first message of a connection, sent by both ranks before any KV moves.

It identifies the process, has what the ranks must agree on (the shape of each layer's KV), and
offers carriers. The content of an offer is up to the carrier. The heads compare the model's
fingerprint over gRPC.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, NamedTuple

import msgpack

from ...errors import PeerRefusedError, TransferError
from ...kv.layout import check_kv_dtype, components_of
from .frame import FrameError

MAGIC = b"TDMG"
PROTOCOL = 2
MAX_GREETING_BYTES = 32 << 10
MAX_LAYERS = 1024
MAX_TEXT_BYTES = 256
MAX_OFFERS = 8
MAX_NAME_BYTES = 32
# The largest offer describes every network device of a machine.
MAX_OFFER_BYTES = (16 << 10) + 64
# Several times the fields of this version.
MAX_FIELDS = 64


class PeerKey(NamedTuple):
    """One start of one rank's process. A tuple, since it is hashed several times a frame."""

    node_id: str
    epoch: int
    rank: int

    def __str__(self) -> str:
        return f"{self.node_id} rank {self.rank} (epoch {self.epoch:016x})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """``connection`` pairs the two sockets of one connection. ``refused`` is the reason of a
    refusal, empty in a welcome. ``full`` is 1 if the refused peer may try again later.

    ``layers``: each layer's ``LayerLayout.shape``. ``offers``: the data of each carrier that the
    rank may use, by the carrier's name, best first. Ranks with the same ``host`` can open each
    other's memory, unless it is empty. ``max_payload``: the largest payload in bytes that the rank
    receives through host memory. ``kv_scales``: the factors of each component of each layer, as
    little-endian float32; empty if all are 1.
    """

    node_id: str
    epoch: int
    rank: int
    tp_size: int
    dtype: str
    max_payload: int
    layers: Sequence[str] = ()
    protocol: int = PROTOCOL
    peer_epoch: int = 0
    connection: int = 0
    refused: str = ""
    full: int = 0
    host: str = ""
    offers: Mapping[str, bytes] = field(default_factory=dict)
    kv_scales: bytes = b""

    @property
    def key(self) -> PeerKey:
        return PeerKey(node_id=self.node_id, epoch=self.epoch, rank=self.rank)

    @property
    def scales(self) -> tuple[float, ...]:
        """``kv_scales`` as numbers."""
        return struct.unpack(f"<{len(self.kv_scales) // 4}f", self.kv_scales)


def packed_scales(scales: Sequence[float]) -> bytes:
    """Numbers as ``Greeting.kv_scales``."""
    return struct.pack(f"<{len(scales)}f", *scales)


_LIMITS = {
    "epoch": 2**64,
    "peer_epoch": 2**64,
    "connection": 2**64,
}


def encode(greeting: Greeting) -> bytes:
    return MAGIC + bytes(msgpack.packb(asdict(greeting)))


def is_greeting(message: memoryview | bytes) -> bool:
    return bytes(message[: len(MAGIC)]) == MAGIC


def decode(message: memoryview | bytes) -> Greeting:
    """Decode untrusted bytes. Raises ``FrameError``."""
    if len(message) > MAX_GREETING_BYTES:
        raise FrameError(f"greeting of {len(message)} bytes; the limit is {MAX_GREETING_BYTES}")
    if not is_greeting(message):
        raise FrameError("not a greeting")
    try:
        values = msgpack.unpackb(
            bytes(message[len(MAGIC) :]),
            max_str_len=2 * MAX_TEXT_BYTES,
            max_bin_len=MAX_OFFER_BYTES,
            max_ext_len=0,
            max_array_len=MAX_LAYERS,
            max_map_len=MAX_FIELDS,
        )
    except Exception as error:  # msgpack raises a dozen unrelated types on hostile input
        raise FrameError(f"greeting is not msgpack of the expected shape: {error}") from None
    return _checked(values)


def check(mine: Greeting, theirs: Greeting) -> None:
    """Raise ``PeerRefusedError``, with the field and both values, for an incompatible peer."""
    _compare("protocol", mine.protocol, theirs.protocol, theirs)
    check_kv_dtype(theirs.dtype)
    _compare("number of layers", len(mine.layers), len(theirs.layers), theirs)
    for number, (ours, other) in enumerate(zip(mine.layers, theirs.layers, strict=True)):
        _compare(f"KV of layer {number}", ours, other, theirs)
    components = sum(map(components_of, mine.layers))
    if len(theirs.scales) not in (0, components):
        raise PeerRefusedError(
            f"number of KV scales: here {components}, at {theirs.node_id} {len(theirs.scales)}"
        )


def _compare(field_name: str, ours: object, other: object, theirs: Greeting) -> None:
    if ours != other:
        raise PeerRefusedError(f"{field_name}: here {ours}, at {theirs.node_id} {other}")


def refusal_text(refusal: TransferError) -> str:
    """The message, cut to the bytes that fit in a greeting."""
    return str(refusal).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def check_epoch(expected: int, actual: int, node_id: str) -> None:
    """Raise ``PeerRefusedError`` for another start of a process, which invalidates agreements."""
    if expected != actual:
        raise PeerRefusedError(f"epoch: {node_id} was {expected:016x}, now {actual:016x}")


def _checked(values: Any) -> Greeting:
    if not isinstance(values, dict):
        raise FrameError(f"greeting is a {type(values).__name__}, not a map")
    # Another version of Tandem may send more fields, or omit optional ones.
    present = [each for each in fields(Greeting) if each.name in values]
    required = {each.name for each in fields(Greeting) if _is_required(each)}
    missing = required - values.keys()
    if missing:
        raise FrameError(f"greeting without {', '.join(sorted(missing))}")
    for each in present:
        _check_value(each.name, str(each.type), values[each.name])
    return Greeting(**{each.name: values[each.name] for each in present})


def _is_required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _check_value(name: str, kind: str, value: Any) -> None:
    if name == "offers":
        _check_offers(value)
        return
    if name == "layers":
        _check_layers(value)
        return
    if name == "kv_scales":
        _check_scales(value)
        return
    if kind == "str":
        _check_text(f"greeting field {name}", value)
        return
    limit = _LIMITS.get(name, 2**32)
    if type(value) is not int or not 0 <= value < limit:
        raise FrameError(f"greeting field {name} must be a number from 0 to {limit - 1}")


def _check_text(what: str, value: Any) -> None:
    if not isinstance(value, str) or len(value.encode()) > 2 * MAX_TEXT_BYTES:
        raise FrameError(f"{what} must be a short text")
    if not value.isprintable():
        raise FrameError(f"{what} has unprintable characters")


def _check_layers(layers: Any) -> None:
    if not isinstance(layers, list):
        raise FrameError("greeting field layers must be a list")
    for number, shape in enumerate(layers):
        _check_text(f"greeting field layers[{number}]", shape)


def _check_scales(value: Any) -> None:
    if not isinstance(value, bytes) or len(value) % 4:
        raise FrameError("greeting field kv_scales must be the bytes of float32 numbers")
    if not all(0 < scale < math.inf for (scale,) in struct.iter_unpack("<f", value)):
        raise FrameError("greeting field kv_scales must have positive and finite numbers")


def _check_offers(offers: Any) -> None:
    if not isinstance(offers, dict) or len(offers) > MAX_OFFERS:
        raise FrameError(f"greeting field offers must be a map of at most {MAX_OFFERS} carriers")
    for name, offer in offers.items():
        if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise FrameError(f"a carrier's name must have 1 to {MAX_NAME_BYTES} bytes")
        if not name.isprintable():
            raise FrameError("a carrier's name has unprintable characters")
        if not isinstance(offer, bytes):
            raise FrameError(f"the offer of carrier {name} must be bytes")
