"""What the sending and the receiving end of a rank share: their surroundings and manners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import frame
from .cache_port import CachePort
from .carrier import Carrier, PeerGoneError
from .closed import ClosedAttempts
from .frame import Header, Kind
from .greeting import Greeting, PeerKey
from .messages import Event, Expect, OpenSend
from .stats import DataPlaneStats


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

    def tell(self, carrier: Carrier, peer: PeerKey, header: Header, reason: str) -> bool:
        """Say why; False when nobody is there to be told, who then finds out alone."""
        try:
            carrier.send_control(peer, frame.encode(header, frame.reason_payload(reason)))
        except PeerGoneError:
            return False
        return True


def why_not(command: Expect | OpenSend, under_way: int | None, closed: ClosedAttempts) -> str:
    """Why an attempt cannot begin beside the one that is ``under_way``; empty when it can."""
    if closed.covers(command.transfer_id, command.attempt):
        return f"attempt {command.attempt} is over"
    if under_way is not None and under_way > command.attempt:
        return f"attempt {under_way} is under way"
    if not 0 <= command.first_token < command.end_token < 2**32:
        return f"tokens [{command.first_token}, {command.end_token}) are no range"
    return ""
