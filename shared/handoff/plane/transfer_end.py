"""The context that the sending and the receiving end of a rank share, and their common rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..carriers.rank_carriers import RankCarriers
from ..carriers.transport import PeerGoneError, TransportEnd
from ..wire import frame
from ..wire.frame import Header, Kind
from ..wire.greeting import Greeting, PeerKey
from ..wire.kv_formats import bytes_of
from .cache_port import CachePort
from .closed import ClosedAttempts
from .messages import Event, Expect, OpenSend
from .stats import DataPlaneStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneEnd:
    """The context of both ends, on the data-plane thread."""

    cache: CachePort
    me: Greeting
    carriers: RankCarriers
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
        """Bytes of one token in one layer, of the heads of this part, in ``dtype``."""
        return len(heads_of(command)) * self.me.head_values_per_token * bytes_of(dtype)

    def window_of(self, command: Expect | OpenSend, carrier: str) -> int:
        """Bytes of this part that may be on the way. Both ends know the carrier."""
        return command.window_bytes or self.carriers.window_of(carrier)

    def send_reason(
        self, transport: TransportEnd, peer: PeerKey, header: Header, reason: str
    ) -> bool:
        """Send a frame with a reason; False when the connection is gone, which the peer will notice
        by itself."""
        try:
            transport.send_control(peer, frame.encode(header, frame.reason_payload(reason)))
        except PeerGoneError:
            return False
        return True


# One part of a transfer on one rank: the transfer, and the peer's rank.
PartKey = tuple[int, int]


def part_of(command: Expect | OpenSend) -> PartKey:
    return command.transfer_id, command.peer_rank


def heads_of(command: Expect | OpenSend) -> range:
    return range(command.first_head, command.end_head)


def refusal(
    command: Expect | OpenSend, me: Greeting, under_way: int | None, closed: ClosedAttempts
) -> str:
    """The reason why an attempt cannot begin beside the one ``under_way``; empty if it can."""
    whole = command.transfer_id, None
    if any(closed.covers(key, command.attempt) for key in (whole, part_of(command))):
        return f"attempt {command.attempt} is over"
    if under_way is not None and under_way > command.attempt:
        return f"attempt {under_way} is under way"
    if not 0 <= command.first_token < command.end_token < 2**32:
        return f"tokens [{command.first_token}, {command.end_token}) are an invalid range"
    firsts, span = command.first_tokens, range(command.first_token, command.end_token)
    if firsts and not (len(firsts) == me.num_layers and all(first in span for first in firsts)):
        return f"first tokens {firsts} do not fit {me.num_layers} layers and tokens {span}"
    if not me.first_head <= command.first_head < command.end_head <= me.end_head:
        return (
            f"heads [{command.first_head}, {command.end_head}) are not all here; this rank has "
            f"[{me.first_head}, {me.end_head})"
        )
    return ""
