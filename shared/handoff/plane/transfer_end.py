"""What the sending and the receiving end of a rank share: their surroundings and manners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..carriers.base import Carrier, PeerGoneError
from ..carriers.cuda_ipc.device import DEVICE_WINDOW_BYTES
from ..stats import DataPlaneStats
from ..wire import frame
from ..wire.frame import Header, Kind
from ..wire.greeting import Greeting, PeerKey
from ..wire.kv_formats import bytes_of
from .cache_port import CachePort
from .closed import ClosedAttempts
from .messages import Event, Expect, OpenSend


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneEnd:
    """What an end works with. It lives on the data-plane thread, like both ends."""

    cache: CachePort
    me: Greeting
    emit: Callable[[Event], None]
    stats: DataPlaneStats
    clock: Callable[[], float]

    def header(
        self, kind: Kind, peer: PeerKey, transfer_id: int, attempt: int, sequence: int = 0
    ) -> Header:
        """A frame without ranges, from this start of this process to that one of the peer's."""
        return Header(
            kind=kind,
            transfer_id=transfer_id,
            attempt=attempt,
            sequence=sequence,
            sender_epoch=self.me.epoch,
            receiver_epoch=peer.epoch,
        )

    def cell_bytes(self, command: Expect | OpenSend, dtype: str) -> int:
        """Bytes of one token in one layer, of the heads of this part, in the format ``dtype``."""
        return len(heads_of(command)) * self.me.head_values_per_token * bytes_of(dtype)

    def tell(self, carrier: Carrier, peer: PeerKey, header: Header, reason: str) -> bool:
        """Say why; False when nobody is there to be told, who then finds out alone."""
        try:
            carrier.send_control(peer, frame.encode(header, frame.reason_payload(reason)))
        except PeerGoneError:
            return False
        return True


HOST_WINDOW_BYTES = 8 << 20

# One part of a transfer on one rank: the transfer, and the peer's rank.
PartKey = tuple[int, int]


def part_of(command: Expect | OpenSend) -> PartKey:
    return command.transfer_id, command.peer_rank


def heads_of(command: Expect | OpenSend) -> range:
    return range(command.first_head, command.end_head)


def window_of(command: Expect | OpenSend, *, on_device: bool) -> int:
    """Bytes of this part that may be on the way. Both ends know what carries them."""
    return command.window_bytes or (DEVICE_WINDOW_BYTES if on_device else HOST_WINDOW_BYTES)


def why_not(
    command: Expect | OpenSend, me: Greeting, under_way: int | None, closed: ClosedAttempts
) -> str:
    """Why an attempt cannot begin beside the one that is ``under_way``; empty when it can."""
    whole = command.transfer_id, None
    if any(closed.covers(key, command.attempt) for key in (whole, part_of(command))):
        return f"attempt {command.attempt} is over"
    if under_way is not None and under_way > command.attempt:
        return f"attempt {under_way} is under way"
    if not 0 <= command.first_token < command.end_token < 2**32:
        return f"tokens [{command.first_token}, {command.end_token}) are no range"
    firsts, span = command.first_tokens, range(command.first_token, command.end_token)
    if firsts and not (len(firsts) == me.num_layers and all(first in span for first in firsts)):
        return f"first tokens {firsts} do not fit {me.num_layers} layers and tokens {span}"
    if not me.first_head <= command.first_head < command.end_head <= me.end_head:
        return (
            f"heads [{command.first_head}, {command.end_head}) are not all here; this rank has "
            f"[{me.first_head}, {me.end_head})"
        )
    return ""
