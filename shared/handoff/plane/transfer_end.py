"""The common context and rules of a rank's sending and receiving ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import PeerRefusedError
from ..carriers.ranks import RankCarriers
from ..carriers.transport import PeerGoneError, TransportEnd
from ..wire import frame
from ..wire.frame import Header, Kind
from ..wire.greeting import Greeting, PeerKey
from .cache_port import CachePort
from .device_waits import DeviceWaits
from .messages import Event, Expect, OpenSend
from .part_layout import PartLayouts
from .stats import DataPlaneStats

MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneEnd:
    """The context of both ends. Used on the data-plane thread."""

    cache: CachePort
    me: Greeting
    layouts: PartLayouts
    carriers: RankCarriers
    emit: Callable[[Event], None]
    stats: DataPlaneStats
    clock: Callable[[], float]
    # Calls back on another thread; ``wake`` ends the loop's wait, from any thread.
    waits: DeviceWaits
    wake: Callable[[], None]

    def header(
        self, kind: Kind, peer: PeerKey, transfer_id: int, attempt: int, sequence: int = 0
    ) -> Header:
        """The header of a frame without ranges, for a peer."""
        return Header(
            kind=kind,
            transfer_id=transfer_id,
            attempt=attempt,
            sequence=sequence,
            sender_epoch=self.me.epoch,
            receiver_epoch=peer.epoch,
        )

    def window_of(self, command: Expect | OpenSend, carrier: str) -> int:
        """The limit of this part's bytes in flight, the same on both ends."""
        return command.window_bytes or self.carriers.window_of(carrier)

    def send_reason(
        self, transport: TransportEnd, peer: PeerKey, header: Header, reason: str
    ) -> bool:
        """Send a frame with a reason; False if the connection is gone, which the peer notices."""
        try:
            transport.send_control(peer, frame.encode(header, frame.reason_payload(reason)))
        except PeerGoneError:
            return False
        return True


# One part of a transfer on one rank: the transfer, and the peer's rank.
PartKey = tuple[int, int]
# A transfer and the peer's rank of a part of it; None: all parts.
ClosedKey = tuple[int, int | None]


class ClosedAttempts:
    """The newest closed attempt of each recent transfer or part, so that none is opened again. The
    oldest are dropped."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._newest: OrderedDict[ClosedKey, int] = OrderedDict()

    def add(self, key: ClosedKey, attempt: int) -> None:
        newest = max(attempt, self._newest.pop(key, attempt))
        self._newest[key] = newest
        if len(self._newest) > self._limit:
            self._newest.popitem(last=False)

    def covers(self, key: ClosedKey, attempt: int) -> bool:
        return attempt <= self._newest.get(key, -1)


def part_of(command: Expect | OpenSend) -> PartKey:
    return command.transfer_id, command.peer_rank


def refusal(
    command: Expect | OpenSend,
    layouts: PartLayouts,
    dtype: str,
    under_way: int | None,
    closed: ClosedAttempts,
) -> str:
    """The reason why an attempt in ``dtype`` cannot begin; empty if it can. ``under_way`` is the
    current attempt, if any."""
    whole = command.transfer_id, None
    if any(closed.covers(key, command.attempt) for key in (whole, part_of(command))):
        return f"attempt {command.attempt} is over"
    if under_way is not None and under_way > command.attempt:
        return f"attempt {under_way} is under way"
    if not 0 <= command.first_token < command.end_token < 2**32:
        return f"tokens [{command.first_token}, {command.end_token}) are an invalid range"
    try:
        layers = len(layouts.of(command.heads, dtype))
    except (PeerRefusedError, ValueError) as error:
        return str(error)
    firsts, span = command.first_tokens, range(command.first_token, command.end_token)
    if firsts and not (len(firsts) == layers and all(first in span for first in firsts)):
        return f"first tokens {firsts} do not fit {layers} layers and tokens {span}"
    return ""
