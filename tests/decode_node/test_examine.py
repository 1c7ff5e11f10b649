"""Examinations of one pair: the report names the obstacle, and always arrives."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import cast

import pytest

from tandem.decode_node import examine
from tandem.decode_node.canary import Canary
from tandem.decode_node.examine import Examiner
from tandem.decode_node.peering.peer import Peer, PeerLostError
from tandem.decode_node.peering.peers import Peers
from tandem.decode_node.peering.prefill_backoff import BackedOffError, PrefillBackoff
from tandem.decode_node.receiving import ReceivingNode
from tandem.proto import tandem_pb2 as pb
from tandem.shared.causes import Cause
from tandem.shared.config import HandoffConfig
from tandem.shared.errors import PeerRefusedError, TransferError
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.plane.messages import PeerJoined
from tandem.tests.decode_node.fake_parts import fake_peer
from tandem.tests.support.clock import SteppedClock
from tandem.tests.support.fake_node import FakeNode

TOKENS = 30
P = pb.PrefillCandidate(node_id="p", epoch=3, address="p:1")


class ExaminedWorld:
    """Peers and a canary that the test controls, and one real port."""

    tokens = TOKENS

    def __init__(self, port: int = 0) -> None:
        self.greeting: TransferError | None = None
        self.singing: TransferError | None = None
        self.held_back = asyncio.Event()
        self.held_back.set()
        self.forgotten = 0
        self.prefill_backoff = PrefillBackoff(SteppedClock())
        self.strangers = 0
        endpoint = f"tcp://127.0.0.1:{port}"
        self.peer = fake_peer(endpoints=(Endpoints(endpoint, endpoint),))
        self.peer.link.tokens_per_second = 500.0
        node = FakeNode("d", 7)
        joined = PeerJoined(node_id="p", epoch=3, rank=0, carrier="tcp", note="")
        node.ranks.inbox.connections.joined(0, joined)
        receiving = ReceivingNode(node.engine, node.identity, node.ranks.inbox, HandoffConfig())
        self.examiner = Examiner(receiving, cast(Peers, self), cast(Canary, self))

    async def report(self) -> pb.PairReport:
        reply = await self.examiner.examine([P])
        assert not reply.left_out
        return reply.pairs[0]

    # ---- peers and the canary --------------------------------------------------------------

    async def greet(self, candidate: pb.PrefillCandidate, *, at_once: bool = False) -> Peer:
        assert at_once, "who examines has perhaps mended what was wrong"
        if self.greeting is not None:
            raise self.greeting
        return self.peer

    async def ping(self, candidate: pb.PrefillCandidate) -> float:
        return 0.012

    meet = greet

    async def live_transfers(self, peer: Peer) -> list[int]:
        await self.held_back.wait()
        return []

    async def forget(self, peer: Peer) -> None:
        self.forgotten += 1

    async def check(self, peer: Peer) -> int:
        if self.singing is not None:
            raise self.singing
        return 64 * TOKENS


async def listening() -> tuple[asyncio.Server, ExaminedWorld]:
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        world.strangers += 1
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    world = ExaminedWorld(server.sockets[0].getsockname()[1])
    return server, world


async def test_a_way_that_works_is_measured_and_no_stranger_comes() -> None:
    server, world = await listening()
    world.prefill_backoff.add(P.address, P.epoch, "silent")
    with closing(server):
        report = await world.report()
    world.prefill_backoff.check(P.address, P.epoch)  # the pause has ended
    assert world.strangers == 0
    assert (report.problem, report.carrier, report.bytes_per_token) == ("", "tcp", 64)
    assert report.tokens_per_second == 500
    assert report.round_trip_seconds > 0 and report.canary_seconds > 0


async def test_a_port_that_is_closed_is_named() -> None:
    server, world = await listening()
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    world.singing = TransferError("no rank came", cause=Cause.TIMEOUT_TRANSFER)
    world.prefill_backoff.add(P.address, P.epoch, "silent")
    report = await world.report()
    with pytest.raises(BackedOffError):
        world.prefill_backoff.check(P.address, P.epoch)
    assert f"its data port 127.0.0.1:{port} cannot be reached" in report.problem
    assert report.cause == Cause.TIMEOUT_GREET


async def test_refusals_and_failed_canaries_are_reported_with_their_cause() -> None:
    server, world = await listening()
    with closing(server):
        world.singing = PeerRefusedError("other KV", cause=Cause.CANARY)
        assert (await world.report()).cause == Cause.CANARY and world.forgotten == 0
        world.singing = PeerLostError("gone")
        assert (await world.report()).cause == Cause.PEER_LOST and world.forgotten == 1
        world.greeting = PeerRefusedError("layers is 2")
        assert (await world.report()).problem == "layers is 2"


async def test_a_node_that_cannot_be_greeted_is_asked_for_a_few_bytes() -> None:
    world = ExaminedWorld()
    world.greeting = TransferError("p:1 does not answer", cause=Cause.PEER_LOST)
    report = await world.report()
    assert (report.cause, report.round_trip_seconds) == (Cause.PEER_LOST, 0.012)
    world.greeting = TransferError("p:1 refuses this node", cause=Cause.REFUSED)
    assert not (await world.report()).round_trip_seconds


async def test_a_silent_peer_has_a_deadline_and_one_examination_runs_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examine, "PAIR_SECONDS", 0.1)
    world = ExaminedWorld()
    world.held_back.clear()
    running = asyncio.create_task(world.report())
    while not world.examiner.busy:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert "did not end within 0.1 s" in (await running).problem
    assert not world.examiner.busy
