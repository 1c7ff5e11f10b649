"""The carriers between this node and its peers, as its ranks report them."""

from __future__ import annotations

from ..config.limits import MAX_PEERS
from .plane.messages import PeerJoined

NONE, MIXED = "none", "mixed"


class Connections:
    """The carrier to each start of a peer. It outlives the connection, so that an attempt that
    ended with it can still be counted; the oldest peer is forgotten first."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._carriers: dict[tuple[str, int], dict[tuple[int, int], str]] = {}

    def joined(self, rank: int, event: PeerJoined) -> None:
        """Record that ``rank`` of this node is connected with a rank of the peer."""
        key = (event.node_id, event.epoch)
        if key not in self._carriers and len(self._carriers) >= self._max_peers:
            del self._carriers[next(iter(self._carriers))]
        self._carriers.setdefault(key, {})[rank, event.rank] = event.carrier

    def carrier(self, node_id: str, epoch: int) -> str:
        """The name of a carrier; ``mixed`` if ranks differ, ``none`` before they have connected."""
        used = set(self._carriers.get((node_id, epoch), {}).values())
        if len(used) > 1:
            return MIXED
        return used.pop() if used else NONE
