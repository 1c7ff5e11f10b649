"""The first message of a connection, sent by both ranks before any KV moves.

It says who is at the other end (which start of which process), what the ranks must agree on (the
shape of a token's bytes, the slice of heads), and which carriers a rank offers. The content of an
offer is the carrier's own. The model's fingerprint is compared by the heads over gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import msgpack

from ...errors import PeerRefusedError, TransferError
from . import frame
from .frame import FrameError
from .kv_formats import bytes_of

MAGIC = b"TDMG"
MAX_GREETING_BYTES = 20 << 10
MAX_TEXT_BYTES = 256
MAX_OFFERS = 8
MAX_NAME_BYTES = 32
# The largest describes every network device of a machine.
MAX_OFFER_BYTES = (16 << 10) + 64
# Several times what this version sends.
MAX_FIELDS = 64

CAPABILITY_XXH3 = 1
CAPABILITIES = CAPABILITY_XXH3

# A peer that differs here can never hand over to this rank.
MUST_AGREE = (
    "protocol",
    "num_layers",
    "head_values_per_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKey:
    """One start of one rank's process."""

    node_id: str
    epoch: int
    rank: int

    def __str__(self) -> str:
        return f"{self.node_id} rank {self.rank} (epoch {self.epoch:016x})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """``connection`` pairs the two sockets of one connection; ``refused`` is empty in a welcome.
    ``full`` is 1 in a refusal for lack of a place, which may be free later.

    ``offers``: what each carrier that the rank may use encoded for the peer, by the carrier's name,
    best first. Empty in greetings of older versions. Two ranks of one ``host`` can open each
    other's memory; empty: no other process can.
    """

    node_id: str
    epoch: int
    rank: int
    tp_size: int
    dtype: str
    num_layers: int
    layer_bytes_per_token: int
    first_head: int
    end_head: int
    protocol: int = frame.VERSION
    capabilities: int = CAPABILITIES
    peer_epoch: int = 0
    connection: int = 0
    refused: str = ""
    full: int = 0
    host: str = ""
    offers: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def head_values_per_token(self) -> int:
        """Numbers in K and V of one head for one token in one layer."""
        heads = max(1, self.end_head - self.first_head)
        return self.layer_bytes_per_token // heads // bytes_of(self.dtype)

    @property
    def key(self) -> PeerKey:
        return PeerKey(node_id=self.node_id, epoch=self.epoch, rank=self.rank)


_LIMITS = {
    "epoch": 2**64,
    "peer_epoch": 2**64,
    "connection": 2**64,
    "capabilities": 2**64,
}


def encode(greeting: Greeting) -> bytes:
    return MAGIC + bytes(msgpack.packb(asdict(greeting)))


def is_greeting(message: memoryview | bytes) -> bool:
    return bytes(message[: len(MAGIC)]) == MAGIC


def decode(message: memoryview | bytes) -> Greeting:
    """A greeting from untrusted bytes. Raises ``FrameError``."""
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
            max_array_len=0,
            max_map_len=MAX_FIELDS,
        )
    except Exception as error:  # msgpack raises a dozen unrelated types on hostile input
        raise FrameError(f"greeting is not msgpack of the expected shape: {error}") from None
    return _checked(values)


def check(mine: Greeting, theirs: Greeting) -> None:
    """Raise ``PeerRefusedError`` for a peer that differs in what must be equal; it names the field
    and both values."""
    for name in MUST_AGREE:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            raise PeerRefusedError(f"{name}: here {ours}, at {theirs.node_id} {other}")
    if not mine.capabilities & theirs.capabilities & CAPABILITY_XXH3:
        raise PeerRefusedError(
            f"capabilities: here {mine.capabilities:#x}, at {theirs.node_id} "
            f"{theirs.capabilities:#x}; the xxh3 checksum is required"
        )


def refusal_text(refusal: TransferError) -> str:
    """As much of it as a greeting may carry, which counts bytes."""
    return str(refusal).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def check_epoch(expected: int, found: int, node_id: str) -> None:
    """Raise ``PeerRefusedError`` for another start of a process: agreements do not outlive one."""
    if expected != found:
        raise PeerRefusedError(f"epoch: {node_id} was {expected:016x}, now {found:016x}")


def _checked(values: Any) -> Greeting:
    if not isinstance(values, dict):
        raise FrameError(f"greeting is a {type(values).__name__}, not a map")
    # Another version of Tandem may send more fields, or fewer of those with a default.
    known = [each for each in fields(Greeting) if each.name in values]
    required = {each.name for each in fields(Greeting) if _is_required(each)}
    lacking = required - values.keys()
    if lacking:
        raise FrameError(f"greeting without {', '.join(sorted(lacking))}")
    for each in known:
        _check_value(each.name, str(each.type), values[each.name])
    return Greeting(**{each.name: values[each.name] for each in known})


def _is_required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _check_value(name: str, kind: str, value: Any) -> None:
    if name == "offers":
        _check_offers(value)
        return
    if kind == "str":
        if not isinstance(value, str) or len(value.encode()) > 2 * MAX_TEXT_BYTES:
            raise FrameError(f"greeting field {name} must be a short text")
        if not value.isprintable():
            raise FrameError(f"greeting field {name} holds unprintable characters")
        return
    limit = _LIMITS.get(name, 2**32)
    if type(value) is not int or not 0 <= value < limit:
        raise FrameError(f"greeting field {name} must be a number from 0 to {limit - 1}")


def _check_offers(offers: Any) -> None:
    if not isinstance(offers, dict) or len(offers) > MAX_OFFERS:
        raise FrameError(f"greeting field offers must be a map of at most {MAX_OFFERS} carriers")
    for name, offer in offers.items():
        if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise FrameError(f"a carrier's name has 1 to {MAX_NAME_BYTES} bytes")
        if not name.isprintable():
            raise FrameError("a carrier's name holds unprintable characters")
        if not isinstance(offer, bytes):
            raise FrameError(f"the offer of carrier {name} must be bytes")
