"""One attempt on the receiving side: events in each state, and cleanup afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.decode_node import receiving
from tandem.decode_node.peering.peer import Peer, PeerLostError, reachable
from tandem.decode_node.receiving import ReceivingNode, TransferResult
from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillStub
from tandem.shared.causes import Cause
from tandem.shared.config import HandoffConfig
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Compute, Generate
from tandem.shared.errors import TransferError
from tandem.shared.handoff import transfer
from tandem.shared.handoff.carriers.transport import Endpoints
from tandem.shared.handoff.lease import LeaseTrust
from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    Cancelled,
    Expect,
    Received,
    ReceiveFailed,
)
from tandem.shared.handoff.wire.head_parts import parts_of
from tandem.tests.decode_node.fake_prefill import ACCEPTED, FakePrefill, accepts, done, prefill
from tandem.tests.support.clock import pausing
from tandem.tests.support.fake_node import ATTENTION, LAYER, RANKS, FakeNode
from tandem.tests.support.waiting import until

ID, WINDOW = 77, 20
WINDOWED = replace(LAYER, attention=replace(ATTENTION, sliding_window=WINDOW))


def prompt_of_50(**fields: Any) -> Sequence:
    return Sequence(1, list(range(50)), Generate(SamplingParams()), **fields)


class Attempt:
    """One attempt under way between a node and a fake prefill node."""

    def __init__(
        self,
        node: FakeNode,
        fake: FakePrefill,
        peer: Peer,
        sequence: Sequence,
        config: HandoffConfig,
        seconds: float,
        end: int,
    ) -> None:
        self.node, self.fake, self.peer = node, fake, peer
        self.sequence = sequence
        reception = node.core.reserve(sequence, 49)
        assert reception is not None
        self.reception = reception
        one = ReceivingNode(node.engine, node.identity, node.ranks.inbox, config)
        self.task = asyncio.create_task(one.receive(reception, peer, ID, 0, end, seconds))

    async def fill(self, count: int = 100) -> None:
        """Report ``count`` received bytes from every rank."""
        expect = await self.node.ranks.wait(Expect)
        self.node.ranks.emit_all(Received, expect, bytes=count)

    async def result(self) -> TransferResult:
        return await asyncio.wait_for(self.task, 10)

    async def error(self) -> TransferError:
        with pytest.raises(TransferError) as caught:
            await self.result()
        return caught.value


@asynccontextmanager
async def attempt(
    script: Any = accepts,
    lease_seconds: float = 10.0,
    greets: bool = True,
    sequence: Sequence | None = None,
    seconds: float = 60.0,
    end: int = 49,
    **config: Any,
) -> AsyncIterator[Attempt]:
    """Check at the end that nothing is held, and that every rank has released the blocks."""
    node = FakeNode("d", 7, layers=(LAYER, WINDOWED, WINDOWED))
    node.ranks.greets = greets
    async with (
        prefill() as fake,
        grpc.aio.insecure_channel(fake.address) as channel,
        node.running(),
    ):
        fake.script = script
        endpoints = (Endpoints("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),) * RANKS
        trust = LeaseTrust(lease_seconds, asyncio.get_running_loop().time)
        parts = parts_of(node.engine.kv_heads(RANKS), node.engine.kv_heads(RANKS))
        stub = PrefillStub(channel)
        peer = Peer(fake.address, "p", 3, endpoints, "float32", parts, stub, channel, trust)
        target = sequence or prompt_of_50()
        one = Attempt(node, fake, peer, target, HandoffConfig(**config), seconds, end)
        yield one
        one.task.cancel()
        await asyncio.wait([one.task])
        assert trust.ids == []
        assert not node.ranks.inbox._attempts
        one.reception.cancel()


async def test_it_is_committed_when_all_ranks_have_what_the_peer_has_sent() -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        await one.fill()
        yield done(RANKS * 100)

    async with attempt(script) as one:
        result = await one.result()
        assert result.bytes == RANKS * 100
        assert result.done is not None and result.done.exposed_seconds == 0.5
        [opened] = one.fake.opened
        assert (opened.first_token, opened.end_token, opened.peer_epoch) == (0, 49, 3)
        assert one.node.ranks.of(CancelExpect) == []


@pytest.mark.parametrize(
    ("choices", "private", "end", "resume_at"),
    [(1, False, 49, 49), (3, False, 49, 48), (1, True, 49, 0), (1, False, 32, 32)],
)
async def test_layers_with_a_window_request_only_what_will_be_seen(
    monkeypatch: pytest.MonkeyPatch,
    choices: int,
    private: bool,
    end: int,
    resume_at: int,
) -> None:
    """From the window of the first token that this node computes, which may be some before the
    prompt's last; everything for a canary."""
    monkeypatch.setattr(transfer, "ACCOUNT_SECONDS", 0.1)
    siblings = [prompt_of_50() for _ in range(choices - 1)]
    sequence = prompt_of_50(siblings=siblings)
    if private:
        sequence.work = Compute(49, private=True)
    async with attempt(sequence=sequence, end=end) as one:
        await one.fill()
        result = await one.result()
        [opened] = one.fake.opened
        assert (opened.end_token, opened.resume_at) == (end, resume_at)
        assert result.end == end
        first = max(0, resume_at - WINDOW + 1)
        for expect in one.node.ranks.of(Expect):
            assert expect.first_tokens == (0, first, first)
        assert result.whole_from == first


async def test_bytes_may_be_faster_than_the_acceptance() -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        await one.fill()
        yield ACCEPTED
        yield done(RANKS * 100)

    async with attempt(script) as one:
        assert (await one.result()).bytes == RANKS * 100


async def test_a_peer_that_has_sent_another_count_is_not_believed() -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        await one.fill()
        yield done(1)

    async with attempt(script) as one:
        error = await one.error()
        assert "sent 1 bytes, 200 arrived" in str(error) and error.cause is Cause.INCOMPLETE


async def test_a_peer_that_falls_silent_after_the_last_byte_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "ACCOUNT_SECONDS", 0.1)
    async with attempt() as one:
        await one.fill()
        assert await one.result() == TransferResult(RANKS * 100, None, 49, 49 - WINDOW + 1)


async def test_a_peer_that_fails_after_the_last_byte_is_not_committed() -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        await one.fill()
        yield pb.OpenEvent(failed=pb.OpenFailed(reason="not finite", cause="compute"))

    async with attempt(script) as one:
        error = await one.error()
        assert "not finite" in str(error) and error.cause is Cause.COMPUTE


async def test_done_without_the_bytes_fails() -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        yield done(100)

    async with attempt(script, progress_timeout=0.1) as one:
        assert "bytes are missing" in str(await one.error())


async def test_a_silent_peer_is_lost() -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        await asyncio.Event().wait()

    async with attempt(script, progress_timeout=0.1) as one:
        error = await one.error()
        assert isinstance(error, PeerLostError)
        assert "is silent: receiving for " in str(error)


async def test_a_peer_is_not_silent_because_this_node_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages sent during the standstill are read afterwards."""
    pause = pausing(monkeypatch)
    monkeypatch.setattr(transfer, "ACCOUNT_SECONDS", 0.1)
    async with attempt() as one:
        await until(lambda: bool(one.fake.opened))
        pause(5.0)
        for _ in range(50):
            await asyncio.sleep(0)
        await one.fill()
        assert (await one.result()).bytes == RANKS * 100


async def test_a_peer_that_stays_silent_after_this_node_stood_still_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pause = pausing(monkeypatch)

    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        await asyncio.Event().wait()

    monkeypatch.setattr(receiving, "UNREAD_SECONDS", 0.05)
    async with attempt(script) as one:
        await until(lambda: bool(one.fake.opened))
        pause(5.0)
        assert isinstance(await one.error(), PeerLostError)


async def test_signs_of_life_prolong_a_transfer_until_its_request_ends() -> None:
    async with attempt(seconds=0.5, transfer_timeout=0.1) as one:
        error = await one.error()
        assert not isinstance(error, PeerLostError) and error.cause is Cause.TIMEOUT_TRANSFER
        assert "when the request's time was over" in str(error)
        [opened] = one.fake.opened
        assert 0 < opened.deadline_seconds <= 0.5


async def test_a_lease_that_is_not_renewed_ends_the_attempt() -> None:
    async with attempt(lease_seconds=0.2) as one:
        error = await one.error()
        assert "has not renewed the lease" in str(error) and error.cause is Cause.LEASE


async def test_ranks_that_are_not_greeted_fail_before_the_peer_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "GREET_SECONDS", 0.1)
    async with attempt(greets=False) as one:
        error = await one.error()
        assert "reserved for " in str(error) and error.cause is Cause.TIMEOUT_GREET
        assert one.fake.opened == []


async def test_a_rank_that_fails_ends_the_attempt_and_the_others_let_go() -> None:
    async with attempt() as one:
        expect = await one.node.ranks.wait(Expect)
        failed = ReceiveFailed(
            transfer_id=expect.transfer_id,
            attempt=0,
            peer_rank=0,
            reason="bad frame",
            retriable=True,
        )
        one.node.ranks.emit(0, failed)
        assert "bad frame" in str(await one.error())
        assert [rank for rank, c in one.node.ranks.commands if isinstance(c, CancelExpect)] == [1]


@pytest.mark.parametrize(
    ("word", "cause"),
    [("died", Cause.DIED), ("peer_lost", Cause.PEER_LOST), ("", Cause.PEER_LOST)],
)
async def test_a_lost_connection_is_explained_by_the_last_word_of_the_peers_head(
    word: str, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "LAST_MESSAGE_SECONDS", 0.2)
    received_event = asyncio.Event()

    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        await received_event.wait()
        if word:
            yield pb.OpenEvent(failed=pb.OpenFailed(reason="rank 0 ended", cause=word))
        await asyncio.Event().wait()

    async with attempt(script) as one:
        expect = await one.node.ranks.wait(Expect)
        await until(lambda: bool(one.fake.opened))
        of: dict[str, Any] = {"transfer_id": expect.transfer_id, "attempt": 0, "peer_rank": 0}
        one.node.ranks.emit(1, Received(**of, bytes=100))  # so it is computing
        reason = "the connection ended"
        lost = ReceiveFailed(**of, reason=reason, retriable=True, cause="peer_lost")
        one.node.ranks.emit(0, lost)
        received_event.set()
        error = await one.error()
        assert error.cause is cause and error.computing


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.ABORTED, True),
        (grpc.StatusCode.UNAVAILABLE, True),
    ],
)
async def test_a_refused_opening_shows_whether_the_process_is_the_same(
    code: grpc.StatusCode, lost: bool
) -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        await context.abort(code, "no")
        yield ACCEPTED

    async with attempt(script) as one:
        error = await one.error()
        assert isinstance(error, PeerLostError) is lost
        assert str(error) == f"{code.name}: no"


async def test_a_peer_that_reports_failure_or_ends_the_call_fails_the_attempt() -> None:
    async def fails(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED
        yield pb.OpenEvent(failed=pb.OpenFailed(reason="held: lost it"))

    async def ends(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        yield ACCEPTED

    for script, reason in ((fails, "held: lost it"), (ends, "without an outcome")):
        async with attempt(script) as one:
            assert reason in str(await one.error())


async def test_a_channel_closed_under_it_means_that_the_peer_is_lost() -> None:
    async with attempt() as one:
        await until(lambda: bool(one.fake.opened))
        await one.peer.channel.close(grace=0)
        assert isinstance(await one.error(), PeerLostError)


@pytest.mark.parametrize("state", ["reserved", "opening", "receiving", "verifying"])
async def test_cancelling_in_any_state_frees_everything(state: str) -> None:
    async def script(request: pb.OpenRequest, context: Any) -> AsyncIterator[pb.OpenEvent]:
        if state == "receiving":
            yield ACCEPTED
        if state == "verifying":
            await one.fill()
        await asyncio.Event().wait()

    async with attempt(script, greets=state != "reserved") as one:
        await one.node.ranks.wait(Expect)
        if state != "reserved":
            await until(lambda: bool(one.fake.opened))
        one.task.cancel()
        await asyncio.wait([one.task])
        assert one.task.cancelled()


async def test_however_often_it_is_cancelled_it_ends_when_the_ranks_have_let_go() -> None:
    async with attempt() as one:
        ranks = one.node.ranks
        ranks.confirms = False
        await ranks.wait(Expect)
        one.task.cancel()
        cancel = await ranks.wait(CancelExpect)
        for _ in range(3):
            one.task.cancel()
            await asyncio.sleep(0)
            assert not one.task.done()
        for rank in range(RANKS):
            ranks.emit(rank, Cancelled(transfer_id=cancel.transfer_id, attempt=0, side="receive"))
        await asyncio.wait([one.task])
        assert one.task.cancelled()


def test_a_wildcard_endpoint_is_reached_where_the_control_plane_is() -> None:
    assert reachable("tcp://0.0.0.0:5", "10.1.2.3:1") == "tcp://10.1.2.3:5"
    assert reachable("tcp://*:5", "10.1.2.3:1") == "tcp://10.1.2.3:5"
    assert reachable("tcp://10.9.9.9:5", "10.1.2.3:1") == "tcp://10.9.9.9:5"
