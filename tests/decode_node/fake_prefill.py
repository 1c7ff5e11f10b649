"""A fake prefill node with scripted replies, which records its RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from tandem.tests.support.fake_node import RANKS
from tandem.tests.support.grpc_server import served

Script = Callable[[pb.OpenRequest, Any], AsyncIterator[pb.OpenEvent]]

ACCEPTED = pb.OpenEvent(accepted=pb.OpenAccepted())
PROGRESS = pb.OpenEvent(progress=pb.OpenProgress())


def done(count: int) -> pb.OpenEvent:
    return pb.OpenEvent(done=pb.OpenDone(bytes=count, exposed_seconds=0.5))


async def accepts(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
    """Send progress until cancelled."""
    yield ACCEPTED
    while True:
        yield PROGRESS
        await asyncio.sleep(0.02)


class FakePrefill(PrefillServicer):
    def __init__(self, epoch: int = 3) -> None:
        self.epoch = epoch
        self.node_id = "p"
        self.script: Script = accepts
        self.refuses = ""
        self.full = ""
        self.lease_seconds = 10.0
        self.curve_keys: list[str] = []
        self.greet_again = False
        self.live_ids: list[int] = []
        self.may_reply = asyncio.Event()  # clear it, and renewals hang
        self.may_reply.set()
        self.hellos = 0
        self.opened: list[pb.OpenRequest] = []
        self.renewed: list[list[int]] = []
        self.released: list[int] = []
        self.address = ""

    @property
    def candidate(self) -> pb.PrefillCandidate:
        return pb.PrefillCandidate(node_id=self.node_id, epoch=self.epoch, address=self.address)

    async def Hello(self, request: pb.Introduction, context: Any) -> pb.HelloReply:
        self.hellos += 1
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses)
        if self.full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.full)
        return pb.HelloReply(
            node=pb.Introduction(
                node_id=self.node_id, epoch=self.epoch, curve_keys=self.curve_keys
            ),
            ranks=[
                pb.RankEndpoint(rank=i, bulk="tcp://*:1", control="tcp://*:2") for i in range(RANKS)
            ],
            lease_seconds=self.lease_seconds,
        )

    async def Open(self, request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        self.opened.append(request)
        async for event in self.script(request, context):
            yield event

    async def Renew(self, request: pb.TransferIds, context: Any) -> pb.TransferIds:
        self.renewed.append(list(request.ids))
        await self.may_reply.wait()
        return pb.TransferIds(ids=[i for i in request.ids if i in self.live_ids])

    async def Live(self, request: pb.LiveRequest, context: Any) -> pb.TransferIds:
        return pb.TransferIds(ids=self.live_ids, greet_again=self.greet_again)

    async def Release(self, request: pb.TransferIds, context: Any) -> pb.TransferIds:
        self.released += request.ids
        return request


@asynccontextmanager
async def prefill(epoch: int = 3) -> AsyncIterator[FakePrefill]:
    fake = FakePrefill(epoch)
    async with served(add_PrefillServicer_to_server, fake) as fake.address:
        yield fake
