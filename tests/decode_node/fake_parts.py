"""Parts of a decode node that contact no other process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc

from tandem.decode_node.examine import Examiner
from tandem.decode_node.peering.peer import Peer
from tandem.decode_node.service import DecodeService
from tandem.decode_node.transfers import PrefillSource, Transfers
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.sequence import Sequence
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.lease import LeaseTrust
from tandem.tests.support.fake_node import FakeNode

if TYPE_CHECKING:
    from tandem.proto.tandem_pb2_grpc import PrefillAsyncStub

Prefill = Callable[[Sequence], Awaitable[PrefillSource]]


class FakeTransfers(Transfers):
    """Calls ``prefill`` for each new sequence, whatever its candidates."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill

    async def prefill_remotely(self, sequence: Sequence, *_: object) -> PrefillSource:
        return await self._prefill(sequence)


def fake_service(node: FakeNode, prefill: Prefill) -> DecodeService:
    """A node's service, which examines no pairs."""
    examiner = cast(Examiner, None)
    return DecodeService(
        node.engine, node.identity, FakeTransfers(prefill), examiner, pb.StatusReply
    )


def fake_peer(
    address: str = "p:1",
    node_id: str = "p",
    epoch: int = 3,
    endpoints: tuple[Endpoints, ...] = (),
    **fields: Any,
) -> Peer:
    """A greeted peer, which must not be contacted."""
    stub, channel = cast("PrefillAsyncStub", None), cast(grpc.aio.Channel, None)
    trust = LeaseTrust(10.0, lambda: 0.0)
    fields = {"weight_format": "float32", **fields}
    return Peer(address, node_id, epoch, endpoints, "float32", [], stub, channel, trust, **fields)
