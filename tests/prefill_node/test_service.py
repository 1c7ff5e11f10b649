"""The sending side over real gRPC, with fake ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tandem.prefill_node import sending
from tandem.prefill_node.service import PrefillService
from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import PrefillStub, add_PrefillServicer_to_server
from tandem.shared.config import HandoffConfig
from tandem.shared.handoff.lease import Tenant
from tandem.shared.handoff.plane.messages import (
    AdmitKeys,
    CancelSend,
    OpenSend,
    SendFailed,
    SendFinished,
)
from tandem.shared.models.spec import LayerSpec
from tandem.shared.node.introduction import introduction
from tandem.tests.support.clock import SteppedClock
from tandem.tests.support.fake_node import ATTENTION, LAYER, RANKS, FakeNode
from tandem.tests.support.grpc_server import served
from tandem.tests.support.waiting import until

if TYPE_CHECKING:
    from tandem.proto.tandem_pb2_grpc import PrefillAsyncStub

ME, EPOCH = "d", 7
PROMPT = list(range(100))


class ServedPrefill(FakeNode):
    """A prefill node and a stub for it."""

    service: PrefillService
    stub: PrefillAsyncStub

    def open(self, transfer_id: int = 1, attempt: int = 0, **fields: Any) -> Any:
        values: dict[str, Any] = {"node_id": ME, "epoch": EPOCH, "peer_epoch": 3, "prompt": PROMPT}
        values |= {"first_token": 20, "end_token": 99, "window_bytes": 1 << 20, "ranks": RANKS}
        values |= {"kv_dtype": "float32"}
        request = pb.OpenRequest(transfer_id=transfer_id, attempt=attempt, **(values | fields))
        return self.stub.Open(request)

    def confirm(self, count: int = RANKS) -> None:
        """Report that every rank of the newest transfer has sent everything."""
        newest = self.ranks.of(OpenSend)[count - 1]
        self.ranks.emit_all(SendFinished, newest, bytes=500, exposed_seconds=0.25)


@asynccontextmanager
async def prefill_node(
    *,
    curve_keys: tuple[str, ...] = (),
    layers: tuple[LayerSpec, ...] = (LAYER,) * 3,
    **config: Any,
) -> AsyncIterator[ServedPrefill]:
    node = ServedPrefill("p", 3, layers=layers, curve_keys=list(curve_keys))
    node.service = PrefillService(
        node.engine,
        node.identity,
        node.ranks.inbox,
        node.metrics,
        pb.StatusReply,
        HandoffConfig(**config),
    )
    async with (
        served(add_PrefillServicer_to_server, node.service) as address,
        grpc.aio.insecure_channel(address) as channel,
        node.running(),
    ):
        node.stub = PrefillStub(channel)
        yield node


def ids(*transfer_ids: int, epoch: int = EPOCH) -> pb.TransferIds:
    return pb.TransferIds(node_id=ME, epoch=epoch, ids=transfer_ids)


async def rest(stream: Any) -> list[pb.OpenEvent]:
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        events.append(event)
    return events


async def refusal(stream: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    return caught.value.code(), caught.value.details() or ""


async def test_an_attempt_is_accepted_followed_and_done_and_frees_its_blocks() -> None:
    async with prefill_node() as node:
        stream = node.open()
        assert (await stream.read()).HasField("accepted")
        opening = await node.ranks.wait(OpenSend)
        assert (opening.first_token, opening.end_token, opening.peer_epoch) == (20, 99, EPOCH)
        assert (await node.stub.Live(pb.LiveRequest(node_id=ME, epoch=EPOCH))).ids == [1]
        node.confirm()
        *before, last = await rest(stream)
        assert {event.WhichOneof("event") for event in before} == {"progress"}
        done = last.done
        assert (done.bytes, done.exposed_seconds) == (RANKS * 500, 0.25)
        assert done.compute_seconds > 0
        await until(lambda: node.service.live == 0)
        assert (await node.stub.Live(pb.LiveRequest(node_id=ME, epoch=EPOCH))).ids == []
        assert node.metric("tandem_transfers_total", outcome="done") == 1


async def test_layers_with_a_window_send_only_what_the_peer_will_see() -> None:
    windowed = replace(LAYER, attention=replace(ATTENTION, sliding_window=30))
    async with prefill_node(layers=(LAYER, windowed, LAYER)) as node:
        for transfer_id, resume_at, first in ((1, 96, 67), (2, 0, 20)):
            stream = node.open(transfer_id, resume_at=resume_at)
            await until(lambda count=transfer_id: len(node.ranks.of(OpenSend)) == count * RANKS)  # type: ignore[misc]
            assert node.ranks.of(OpenSend)[-1].first_tokens == (20, first, 20)
            node.confirm(RANKS * transfer_id)
            assert (await rest(stream))[-1].HasField("done")


async def test_a_private_attempt_is_neither_counted_nor_cached() -> None:
    async with prefill_node() as node:
        stream = node.open(private=True)
        await node.ranks.wait(OpenSend)
        node.confirm()
        assert (await rest(stream))[-1].HasField("done")
        await until(lambda: node.service.live == 0)
        assert node.metric("tandem_transfers_total", outcome="done") == 0
        assert node.scheduler.pool.counts().cached == 0


async def test_a_canary_is_taken_and_computed_first_however_long_the_queue() -> None:
    async with prefill_node() as node:
        node.ranks.computes.clear()
        for number in range(9):  # of which one runs
            stream = node.open(number, prompt=[number] * 500, end_token=499)
            assert (await stream.read()).HasField("accepted")
            await until(lambda: node.core.stepping)
        code, reason = await refusal(node.open(10))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "requests are waiting" in reason
        canary = node.open(9, prompt=PROMPT[:31], first_token=0, end_token=30, private=True)
        assert (await canary.read()).HasField("accepted")
        node.ranks.computes.set()
        num_sends = 3 * RANKS  # the first prompt was computing, and another one may go with it
        while not [send for send in node.ranks.of(OpenSend) if send.transfer_id == 9]:
            assert len(node.ranks.of(OpenSend)) < num_sends
            await asyncio.sleep(0)
        code, reason = await refusal(node.open(11, private=True, prompt=[1] * 129, end_token=99))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "may have at most 128" in reason
        await node.stub.Release(ids(*range(12)))


async def test_a_prompt_in_mid_stream_is_taken_and_computed_before_those_that_wait() -> None:
    async with prefill_node() as node:
        node.ranks.computes.clear()
        for number in range(9):  # of which one runs
            stream = node.open(number, prompt=[number] * 500, end_token=499)
            assert (await stream.read()).HasField("accepted")
            await until(lambda: node.core.stepping)
        moved = node.open(9, prompt=[9] * 500, end_token=499, mid_stream=True)
        assert (await moved.read()).HasField("accepted")
        node.ranks.computes.set()
        num_sends = 3 * RANKS  # as for a canary
        while not [send for send in node.ranks.of(OpenSend) if send.transfer_id == 9]:
            assert len(node.ranks.of(OpenSend)) < num_sends
            await asyncio.sleep(0)
        await node.stub.Release(ids(*range(10)))


async def test_an_expired_lease_ends_the_attempt_and_renewed_ones_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SteppedClock()
    monkeypatch.setattr("tandem.prefill_node.service.time", SimpleNamespace(monotonic=clock))
    async with prefill_node(lease_seconds=0.5) as node:
        node.ranks.computes.clear()
        stream = node.open()
        assert (await stream.read()).HasField("accepted")
        await node.ranks.wait(OpenSend)
        renewed = node.open(2)
        assert (await renewed.read()).HasField("accepted")
        expire = asyncio.create_task(node.service.expire_leases())
        for _ in range(3):
            clock.now += 0.3
            assert (await node.stub.Renew(ids(2, 9))).ids == [2]
        await until(lambda: 1 not in node.service._sending)
        assert len(node.ranks.of(CancelSend)) == RANKS
        assert node.service.live == 1
        assert node.metric("tandem_transfers_total", outcome="cancelled", cause="lease") == 1
        expire.cancel()
        node.ranks.computes.set()
        renewed.cancel()


async def test_only_the_tenant_itself_ends_its_transfer() -> None:
    async with prefill_node() as node:
        stream = node.open()
        await stream.read()
        assert (await node.stub.Release(ids(1, epoch=8))).ids == []
        assert (await node.stub.Renew(ids(1, epoch=8))).ids == []
        assert node.service.live == 1
        assert (await node.stub.Release(ids(1, 5))).ids == [1]
        assert node.service.live == 0
        assert (await node.stub.Release(ids(1))).ids == []


async def test_a_new_epoch_voids_what_the_old_one_held() -> None:
    async with prefill_node() as node:
        await node.open().read()
        hello = introduction(node.engine, node.identity)
        hello.node_id, hello.epoch = ME, EPOCH + 1
        reply = await node.stub.Hello(hello)
        assert node.metric("tandem_transfers_total", cause="peer_lost") == 1
        assert reply.lease_seconds == 10 and len(reply.ranks) == RANKS
        assert node.service.live == 0


async def test_a_greeting_has_the_advertised_addresses_of_the_ranks() -> None:
    async with prefill_node(kv_advertise="nat.example:8200") as node:
        reply = await node.stub.Hello(introduction(node.engine, node.identity))
        endpoints = [(rank.bulk, rank.control) for rank in reply.ranks]
        ports = [(8200 + 2 * rank, 8201 + 2 * rank) for rank in range(RANKS)]
        assert endpoints == [(f"tcp://nat.example:{a}", f"tcp://nat.example:{b}") for a, b in ports]


KEY = "HKdmGwHfyOUqeFHhjEcTtgQqORXJJdEZWwwHUP-X"


def hello(node: ServedPrefill, *keys: str, ranks: int = RANKS) -> pb.Introduction:
    mine = introduction(node.engine, node.identity)
    del mine.curve_keys[:]
    mine.MergeFrom(pb.Introduction(node_id=ME, epoch=EPOCH, curve_keys=keys))
    mine.tensor_parallel_size = ranks
    return mine


async def test_a_locked_node_admits_the_keys_of_peers_that_greet_it() -> None:
    keys = (KEY, KEY.swapcase())
    async with prefill_node(curve_keys=("p0", "p1")) as node:
        live = pb.LiveRequest(node_id=ME, epoch=EPOCH)
        assert (await node.stub.Live(live)).greet_again
        reply = await node.stub.Hello(hello(node, *keys))
        assert [command.keys for command in node.ranks.of(AdmitKeys)] == [keys] * RANKS
        assert list(reply.node.curve_keys) == ["p0", "p1"]
        assert not (await node.stub.Live(live)).greet_again


@pytest.mark.parametrize("locked", [True, False])
async def test_a_peer_with_more_ranks_than_the_model_has_heads_cannot_greet(locked: bool) -> None:
    """Even with that many valid keys: messages to ranks have a limit."""
    async with prefill_node(curve_keys=("p0", "p1") if locked else ()) as node:
        keys = [KEY] * 1000 if locked else []
        with pytest.raises(grpc.aio.AioRpcError, match="a peer with 1000 ranks"):
            await node.stub.Hello(hello(node, *keys, ranks=1000))
        assert not node.ranks.of(AdmitKeys)


@pytest.mark.parametrize(
    ("locked", "keys", "words"),
    [
        (True, (), "announces 0 CURVE keys, and 2 are expected"),
        (True, (KEY, "short"), "announces the invalid key 'short'"),
        (False, (KEY, KEY), "announces 2 CURVE keys, and 0 are expected"),
    ],
)
async def test_a_peer_that_is_not_locked_like_this_node_cannot_greet(
    locked: bool, keys: tuple[str, ...], words: str
) -> None:
    async with prefill_node(curve_keys=("p0", "p1") if locked else ()) as node:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.stub.Hello(hello(node, *keys))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert words in (caught.value.details() or "")
        assert node.ranks.of(AdmitKeys) == []


async def test_a_newer_attempt_takes_over_and_an_older_one_is_refused() -> None:
    async with prefill_node() as node:
        await node.open(attempt=1).read()
        for attempt in (0, 1):
            code, reason = await refusal(node.open(attempt=attempt))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "not newer than 1" in reason
        code, _ = await refusal(node.open(attempt=2, epoch=8))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        newer = node.open(attempt=2)
        assert (await newer.read()).HasField("accepted")
        assert node.service.live == 1
        newer.cancel()


async def test_a_peer_that_takes_slowly_leaves_room_for_the_others() -> None:
    """36 of 64 blocks wait for one peer; another peer's request is accepted."""
    of = {"first_token": 0, "end_token": 288}
    async with prefill_node() as node:
        streams = [node.open(number, prompt=[number] * 289, **of) for number in (1, 2)]
        for stream in streams:
            assert (await stream.read()).HasField("accepted")
        await until(lambda: node.service._unsent_blocks(Tenant(ME, EPOCH)) == 36)
        code, reason = await refusal(node.open(3, prompt=[3] * 289, **of))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason == "peer has 36 unsent blocks, more than the 28 free ones; retry later"
        other = node.open(4, prompt=[4] * 289, node_id="e", **of)
        assert (await other.read()).HasField("accepted")
        await until(lambda: node.service._unsent_blocks(Tenant("e", EPOCH)) == 18)
        for stream in (*streams, other):
            stream.cancel()
        await until(lambda: node.service.live == 0)


async def test_what_cannot_be_started_is_refused_with_the_reason() -> None:
    async with prefill_node() as node:
        cases: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
            ({"peer_epoch": 4}, grpc.StatusCode.ABORTED, "is not this process"),
            ({"end_token": 100}, grpc.StatusCode.INVALID_ARGUMENT, "the last one"),
            ({"resume_at": 100}, grpc.StatusCode.INVALID_ARGUMENT, "leaves a gap after 99"),
            ({"prompt": [9999] * 100}, grpc.StatusCode.INVALID_ARGUMENT, "vocabulary"),
            ({"prompt": [1] * 600}, grpc.StatusCode.INVALID_ARGUMENT, "context"),
        ]
        for fields, code, reason in cases:
            status, words = await refusal(node.open(**fields))
            assert status is code and reason in words, words
        node.service.draining = True
        status, words = await refusal(node.open())
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED and "draining" in words


async def test_a_failed_rank_or_a_failed_step_fails_the_attempt_in_its_state() -> None:
    async with prefill_node() as node:
        stream = node.open()
        opening = await node.ranks.wait(OpenSend)
        await until(lambda: node.service._sending[1].state.value in ("streaming", "held"))
        node.ranks.emit_all(SendFailed, opening, reason="lost it", cause="timeout_progress")
        *_, failed = await rest(stream)
        assert failed.failed.cause == "timeout_progress"
        assert failed.failed.reason in ("held: lost it", "streaming: lost it")
        node.ranks.fails = "not finite"
        *_, failed = await rest(node.open(2, prompt=PROMPT[::-1]))
        assert "not finite" in failed.failed.reason and failed.failed.cause == "compute"


async def test_an_attempt_ends_with_its_request() -> None:
    async with prefill_node() as node:
        node.ranks.computes.clear()
        *_, failed = await rest(node.open(deadline_seconds=0.2))
        assert failed.failed.reason.startswith("running: running for ")
        assert failed.failed.cause == "timeout_transfer"
        node.ranks.computes.set()


async def test_a_prompt_waits_while_the_node_computes_but_not_when_it_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one fills the pool; the step that computes it may never end."""
    monkeypatch.setattr(sending, "HEARTBEAT_SECONDS", 0.05)
    of = {"first_token": 0, "end_token": 510}
    async with prefill_node(transfer_timeout=1.5) as node:
        node.ranks.computes.clear()
        streams = []
        for number in (1, 2, 3):
            streams.append(node.open(number, prompt=[number] * 511, **of))
            assert (await streams[-1].read()).HasField("accepted")
        signs = [await stream.read() for stream in streams for _ in range(20)]
        assert {sign.WhichOneof("event") for sign in signs} == {"progress"}
        node.ranks.computes.set()
        # Two of 32 blocks each are computed, and no peer takes them: the third one has no room.
        async with asyncio.timeout(30):
            *_, failed = await rest(streams[2])
        assert failed.failed.reason.startswith("queued: queued for")
        for stream in streams:
            stream.cancel()


async def test_a_client_that_goes_away_frees_everything() -> None:
    async with prefill_node() as node:
        stream = node.open()
        await node.ranks.wait(OpenSend)
        stream.cancel()
        await node.ranks.wait(CancelSend)
        await until(lambda: node.service.live == 0)
        assert node.metric("tandem_transfers_total", outcome="cancelled") == 1


@pytest.mark.parametrize("fails", ["", "numbers are not finite"])
async def test_bytes_that_are_confirmed_count_only_once_their_step_is_over(fails: str) -> None:
    async with prefill_node() as node:
        node.ranks.computes.clear()
        stream = node.open()
        await node.ranks.wait(OpenSend)
        sending = node.service._sending[1]
        node.confirm()
        await until(lambda: sending._confirmed == RANKS)
        assert node.held() > 0  # the step still writes them
        node.ranks.fails = fails
        node.ranks.computes.set()
        last = (await rest(stream))[-1]
        if fails:
            assert last.failed.cause == "compute" and fails in last.failed.reason
        else:
            assert last.done.bytes == RANKS * 500 and last.done.compute_seconds >= 0


async def test_time_after_the_computation_is_not_reported_as_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SteppedClock(1.0)
    monkeypatch.setattr(sending, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("tandem.prefill_node.sending.time", SimpleNamespace(monotonic=clock))
    async with prefill_node() as node:
        stream = node.open()
        while (await stream.read()).progress.computed_tokens < 99:
            pass
        clock.now += 100
        node.confirm()
        *_, last = await rest(stream)
        assert last.done.compute_seconds < 50
