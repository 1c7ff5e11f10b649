"""What two ranks tell each other when they connect, before any KV moves.

Equal where it must be equal, and refused by name where it is not. The model's fingerprint is
compared by the heads over gRPC; this greeting guards what the ranks themselves rely on: the shape
of a token's bytes, the slice of heads, and which start of which process is at the other end.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import msgpack

from ...errors import PeerRefusedError, TransferError
from ..carriers.cuda_ipc.device import NO_DEVICE_PLACE, DevicePlace
from ..carriers.names import BEST_FIRST, CUDA_IPC, NIXL, ON_ONE_HOST, SHARED_MEMORY, TCP
from ..carriers.nixl.agent import MAX_DESCRIPTION_BYTES, NO_PLACE, NixlPlace
from ..carriers.shared_memory.ring import NO_RING, RingPlace
from . import frame
from .frame import FrameError
from .kv_formats import bytes_of

MAGIC = b"TDMG"
MAX_GREETING_BYTES = 4096 + MAX_DESCRIPTION_BYTES
MAX_TEXT_BYTES = 256
# Twice what this version says.
MAX_FIELDS = 64

CAPABILITY_XXH3 = 1
# Of a payload in a device's memory: xxh3 over its row sums (``kernels/row_sums.py``).
CAPABILITY_ROW_SUMS = 2
CAPABILITIES = CAPABILITY_XXH3 | CAPABILITY_ROW_SUMS
_REQUIRED = {
    CAPABILITY_XXH3: "the xxh3 checksum is required",
    CAPABILITY_ROW_SUMS: f"{CUDA_IPC} requires the checksum of row sums",
}

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

    @property
    def agent(self) -> str:
        """The name of its NIXL agent."""
        return f"{self.node_id}/{self.rank}/{self.epoch:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """``connection`` pairs the two sockets of one connection; ``refused`` is empty in a welcome.
    ``full`` is 1 in a refusal for want of a place, which may be free later.

    ``carriers`` are those that a rank may use, best first, with commas. ``host`` and the place of
    a ring let two ranks on one host find each other's memory; a ring of no bytes is none.
    ``bell_descriptor`` is the sender's doorbell for this connection, in the process of the ring.
    ``nixl_description``, address and bytes are those of a ring that is registered with NIXL.
    ``device_handle`` and bytes are those of a ring in the memory of the GPU ``device``, and
    ``device_bell`` is its doorbell for this connection, in the process ``device_pid``.
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
    carriers: str = TCP
    host: str = ""
    ring_pid: int = 0
    ring_descriptor: int = 0
    ring_bytes: int = 0
    ring_nonce: int = 0
    bell_descriptor: int = 0
    nixl_description: bytes = b""
    nixl_address: int = 0
    nixl_bytes: int = 0
    device: str = ""
    device_handle: bytes = b""
    device_bytes: int = 0
    device_pid: int = 0
    device_bell: int = 0

    @property
    def head_values_per_token(self) -> int:
        """Numbers in K and V of one head for one token in one layer."""
        heads = max(1, self.end_head - self.first_head)
        return self.layer_bytes_per_token // heads // bytes_of(self.dtype)

    @property
    def ring(self) -> RingPlace:
        return RingPlace(self.ring_pid, self.ring_descriptor, self.ring_bytes, self.ring_nonce)

    def with_ring(self, place: RingPlace) -> Greeting:
        """The same from a rank whose ring can be mapped."""
        return replace(
            self,
            ring_pid=place.pid,
            ring_descriptor=place.descriptor,
            ring_bytes=place.bytes,
            ring_nonce=place.nonce,
        )

    def without_ring(self) -> Greeting:
        """The same from a rank whose ring nobody can map."""
        return replace(self.with_ring(NO_RING), carriers=self._carriers_but(SHARED_MEMORY))

    @property
    def nixl(self) -> NixlPlace:
        return NixlPlace(self.nixl_description, self.nixl_address, self.nixl_bytes)

    def with_nixl(self, place: NixlPlace) -> Greeting:
        """The same from a rank whose ring can be read by NIXL."""
        return replace(
            self,
            nixl_description=place.description,
            nixl_address=place.address,
            nixl_bytes=place.bytes,
        )

    def without_nixl(self) -> Greeting:
        """The same to a peer that does not use NIXL, which need not know our keys."""
        return replace(self.with_nixl(NO_PLACE), carriers=self._carriers_but(NIXL))

    @property
    def device_place(self) -> DevicePlace:
        return DevicePlace(self.device, self.device_handle, self.device_bytes)

    def with_device(self, place: DevicePlace) -> Greeting:
        """The same from a rank with a ring in a device's memory."""
        return replace(
            self, device=place.device, device_handle=place.handle, device_bytes=place.bytes
        )

    def without_device(self) -> Greeting:
        """The same from a rank whose KV does not move from device to device."""
        none = self.with_device(NO_DEVICE_PLACE)
        return replace(none, carriers=self._carriers_but(CUDA_IPC))

    def _carriers_but(self, without: str) -> str:
        return ",".join(name for name in self.carriers.split(",") if name != without)

    @property
    def key(self) -> PeerKey:
        return PeerKey(node_id=self.node_id, epoch=self.epoch, rank=self.rank)


_LIMITS = {
    "epoch": 2**64,
    "peer_epoch": 2**64,
    "connection": 2**64,
    "capabilities": 2**64,
    "ring_bytes": 2**64,
    "ring_nonce": 2**64,
    "nixl_address": 2**64,
    "nixl_bytes": 2**64,
    "device_bytes": 2**64,
}


def encode(greeting: Greeting) -> bytes:
    return MAGIC + bytes(msgpack.packb(asdict(greeting)))


def is_greeting(message: memoryview | bytes) -> bool:
    return bytes(message[: len(MAGIC)]) == MAGIC


def decode(message: memoryview | bytes) -> Greeting:
    """A greeting out of bytes that anybody may have sent."""
    if len(message) > MAX_GREETING_BYTES:
        raise FrameError(f"greeting of {len(message)} bytes; the limit is {MAX_GREETING_BYTES}")
    if not is_greeting(message):
        raise FrameError("not a greeting")
    try:
        values = msgpack.unpackb(
            bytes(message[len(MAGIC) :]),
            max_str_len=2 * MAX_TEXT_BYTES,
            max_bin_len=MAX_DESCRIPTION_BYTES,
            max_ext_len=0,
            max_array_len=0,
            max_map_len=MAX_FIELDS,
        )
    except Exception as error:  # msgpack raises a dozen unrelated types on hostile input
        raise FrameError(f"greeting is not msgpack of the expected shape: {error}") from None
    return _checked(values)


def check(mine: Greeting, theirs: Greeting) -> None:
    """Refuse a peer that differs in what must be equal, naming the field and both values."""
    for name in MUST_AGREE:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            raise PeerRefusedError(f"{name}: here {ours}, at {theirs.node_id} {other}")
    if not mine.capabilities & theirs.capabilities & CAPABILITY_XXH3:
        raise _lack_of(CAPABILITY_XXH3, mine, theirs)


def refusal_text(refusal: TransferError) -> str:
    """As much of it as a greeting may carry, which counts bytes."""
    return str(refusal).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def check_epoch(expected: int, found: int, whose: str) -> None:
    """A restarted process is another process: what was agreed with the one before is void."""
    if expected != found:
        raise PeerRefusedError(f"epoch: {whose} was {expected:016x}, now {found:016x}")


def possible_carriers(mine: Greeting, theirs: Greeting) -> tuple[str, ...]:
    """What this pair may use, best first. Raises ``PeerRefusedError`` when that is nothing."""
    ours, others = mine.carriers.split(","), theirs.carriers.split(",")
    both = [name for name in BEST_FIRST if name in ours and name in others]
    if not mine.host or mine.host != theirs.host:
        both = [name for name in both if name not in ON_ONE_HOST]
    if CUDA_IPC in both and not mine.capabilities & theirs.capabilities & CAPABILITY_ROW_SUMS:
        both.remove(CUDA_IPC)
        if not both:
            raise _lack_of(CAPABILITY_ROW_SUMS, mine, theirs)
    if not both:
        where = "one host" if mine.host and mine.host == theirs.host else "two hosts"
        raise PeerRefusedError(
            f"carrier: here {mine.carriers}, at {theirs.node_id} {theirs.carriers}, on {where}"
        )
    return tuple(both)


def _lack_of(capability: int, mine: Greeting, theirs: Greeting) -> PeerRefusedError:
    return PeerRefusedError(
        f"capabilities: here {mine.capabilities:#x}, at {theirs.node_id} "
        f"{theirs.capabilities:#x}; {_REQUIRED[capability]}"
    )


def _checked(values: Any) -> Greeting:
    if not isinstance(values, dict):
        raise FrameError(f"greeting is a {type(values).__name__}, not a map")
    # Another version of Tandem may say more, or less of what has a default.
    known = [field for field in fields(Greeting) if field.name in values]
    lacking = {field.name for field in fields(Greeting) if field.default is MISSING} - values.keys()
    if lacking:
        raise FrameError(f"greeting without {', '.join(sorted(lacking))}")
    for field in known:
        _check_value(field.name, str(field.type), values[field.name])
    return Greeting(**{field.name: values[field.name] for field in known})


def _check_value(name: str, kind: str, value: Any) -> None:
    if kind == "str":
        if not isinstance(value, str) or len(value.encode()) > 2 * MAX_TEXT_BYTES:
            raise FrameError(f"greeting field {name} must be a short text")
        if not value.isprintable():
            raise FrameError(f"greeting field {name} holds unprintable characters")
        return
    if kind == "bytes":
        if not isinstance(value, bytes):
            raise FrameError(f"greeting field {name} must be bytes")
        return
    limit = _LIMITS.get(name, 2**32)
    if type(value) is not int or not 0 <= value < limit:
        raise FrameError(f"greeting field {name} must be a number from 0 to {limit - 1}")
