"""Prefill nodes that this node must not use, with the reasons."""

from __future__ import annotations

from ...proto import tandem_pb2 as pb
from ...shared.causes import Cause
from ...shared.errors import PeerRefusedError

MAX_REFUSED = 1024


class RefusedPeers:
    """The latest refusal for each address, until another process starts there."""

    def __init__(self) -> None:
        self._refused: dict[str, pb.RefusedPeer] = {}

    def add(self, address: str, node_id: str, epoch: int, error: PeerRefusedError) -> None:
        if len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[address] = pb.RefusedPeer(
            address=address,
            node_id=node_id,
            epoch=epoch,
            reason=str(error),
            cause=error.cause.value,
        )

    def refuses(self, address: str, epoch: int) -> bool:
        """True if this start of the process was refused before."""
        refused = self._refused.get(address)
        return refused is not None and refused.epoch == epoch

    def check(self, address: str, epoch: int) -> None:
        """Raise ``PeerRefusedError`` for a start that was refused before."""
        if self.refuses(address, epoch):
            refused = self._refused[address]
            raise PeerRefusedError(refused.reason, cause=Cause(refused.cause))

    def all(self) -> list[pb.RefusedPeer]:
        return list(self._refused.values())
