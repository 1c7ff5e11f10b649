"""The KV of one prompt: the nodes that are tried, their order, and local prefill if none can."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

import pytest

from tandem.decode_node import transfers as module
from tandem.decode_node.peering.peer import Peer, PeerLostError
from tandem.decode_node.peering.peers import Peers
from tandem.decode_node.peering.prefill_backoff import SILENCE, PrefillBackoff
from tandem.decode_node.prompt_deaths import GivenUpError, PromptDeaths
from tandem.decode_node.receiving import ReceivingNode, TransferResult
from tandem.decode_node.transfers import PrefillSource, Transfers
from tandem.proto import tandem_pb2 as pb
from tandem.shared.causes import Cause
from tandem.shared.config import HandoffConfig
from tandem.shared.engine.plan import StepResult
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Phase, Sequence
from tandem.shared.engine.work import Generate
from tandem.shared.errors import PeerRefusedError, TransferError, UnavailableError
from tandem.tests.decode_node.fake_parts import fake_peer
from tandem.tests.support.clock import pausing
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.step_rows import rows_of
from tandem.tests.support.waiting import until

A, B, C = (pb.PrefillCandidate(node_id=name, address=name) for name in "abc")


@dataclass(frozen=True, slots=True)
class FakeReceivingNode(ReceivingNode):
    """A node whose attempts are scripted by a test's ``world``."""

    world: TransferWorld

    async def receive(
        self,
        reception: Reception,
        peer: Peer,
        transfer_id: int,
        attempt: int,
        end: int,
        seconds: float,
    ) -> TransferResult:
        return await self.world.receive(peer, attempt, end, seconds)


class TransferWorld:
    """Transfers whose peers and attempts end by ``fates``, for each address."""

    def __init__(self, fates: dict[str, Exception | None], threshold: int | None = 1) -> None:
        self.node = FakeNode("d", 7)
        self.fates = fates
        self.refused: set[str] = set()
        self.seconds = 60.0  # until the request's deadline
        self.deaths = PromptDeaths()
        self.dead: set[str] = set()  # addresses at which no process listens any longer
        self.prefill_backoff = PrefillBackoff(time.monotonic)
        self.forgotten: list[str] = []
        self.greeted: set[str] = set()
        self.weight_format = "float32"  # of every peer; this node's own
        self.attempts: list[tuple[str, int]] = []
        self.done: pb.OpenDone | None = None  # of each attempt that succeeds
        self.config = HandoffConfig(prefill_threshold=threshold)
        self.sequence = Sequence(1, list(range(100)), Generate(SamplingParams()))
        node = FakeReceivingNode(
            self.node.engine, self.node.identity, self.node.ranks.inbox, self.config, self
        )
        self.transfers = Transfers(node, cast(Peers, self), self.node.metrics)

    async def run(self, *candidates: pb.PrefillCandidate) -> PrefillSource:
        deadline = time.monotonic() + self.seconds
        return await self.transfers.prefill_remotely(
            self.sequence, list(candidates), deadline, self.deaths
        )

    def local(self, reason: str) -> float:
        return self.node.metric("tandem_prompts_total", where="local", reason=reason)

    # ---- peers and attempts ----------------------------------------------------------------

    def refuses(self, candidate: pb.PrefillCandidate) -> bool:
        return candidate.address in self.refused

    def at(self, candidate: pb.PrefillCandidate) -> Peer | None:
        return self._peer(candidate) if candidate.address in self.greeted else None

    def _peer(self, candidate: pb.PrefillCandidate) -> Peer:
        return fake_peer(
            candidate.address, candidate.node_id, epoch=0, weight_format=self.weight_format
        )

    async def meet(self, candidate: pb.PrefillCandidate) -> Peer:
        self.prefill_backoff.check(candidate.address, candidate.epoch)
        error = self.fates[candidate.address]
        if isinstance(error, PeerRefusedError):
            raise error
        self.greeted.add(candidate.address)
        return self._peer(candidate)

    async def has_ended(self, candidate: pb.PrefillCandidate) -> bool:
        return candidate.address in self.dead

    async def forget(self, peer: Peer) -> None:
        self.forgotten.append(peer.address)

    async def receive(self, peer: Peer, attempt: int, end: int, seconds: float) -> TransferResult:
        assert 0 < seconds <= self.seconds
        self.attempts.append((peer.address, attempt))
        error = self.fates[peer.address]
        if isinstance(error, TimeoutError):
            await asyncio.Event().wait()  # for ever
        if error is not None:
            raise error
        return TransferResult(1000, self.done, end)


@pytest.mark.parametrize(
    ("slow", "cause", "absent"),
    [
        *((0.0, cause, cause in SILENCE | {Cause.NO_PLACE}) for cause in Cause),
        *((60.0, cause, False) for cause in sorted(SILENCE)),
    ],
)
async def test_only_long_silence_and_full_nodes_cause_a_backoff(
    slow: float, cause: Cause, absent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", slow)
    world = TransferWorld({"a": TransferError("silent", cause=cause), "b": None})
    assert await world.run(A, B) == PrefillSource(node="b")
    with pytest.raises(TransferError, match="silent") if absent else contextlib.nullcontext():
        world.prefill_backoff.check("a", A.epoch)
    world.prefill_backoff.check("b", B.epoch)


async def test_requests_do_not_fill_the_log_during_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = TransferWorld({"a": None, "b": TransferError("no blocks there")})
    world.prefill_backoff.add("a", A.epoch, "gave no sign of life")
    async with world.node.running():
        await world.run(A, B)
    messages = [r.getMessage() for r in caplog.records if "attempt" in r.getMessage()]
    assert len(messages) == 1 and "no blocks there" in messages[0]
    assert world.local("failed: other") == 1


async def test_requests_do_not_fill_the_log_until_routers_miss_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request fails there, but only the first is logged, and the first after a success."""
    world = TransferWorld({"a": PeerLostError("connection refused")})

    async def failures(count: int) -> int:
        caplog.clear()
        for number in range(count):
            world.sequence = Sequence(number, list(range(100)), Generate(SamplingParams()))
            await world.run(A)
            world.node.core.cancel(world.sequence)
        return sum("attempt" in each.getMessage() for each in caplog.records)

    caplog.set_level(logging.INFO)
    assert await failures(3) == 1
    world.fates["a"] = TransferError("no blocks there", cause=Cause.BUSY)
    assert await failures(2) == 1
    world.fates["a"] = None
    assert await failures(1) == 0
    world.fates["a"] = TransferError("no blocks there", cause=Cause.BUSY)
    assert await failures(2) == 1
    assert world.local("failed: busy") == 4


async def test_a_full_prefill_node_is_backed_off_from_under_that_reason() -> None:
    full = "1 ranks are connected, which is the limit; see --max-peers"
    world = TransferWorld({"a": TransferError(full, cause=Cause.NO_PLACE)})
    for number in range(2):
        world.sequence = Sequence(number, list(range(100)), Generate(SamplingParams()))
        assert (await world.run(A)).reason == "failed: no_place"
    assert world.attempts == [("a", 0)]
    with pytest.raises(TransferError, match=f"not contacted for .*: {full}"):
        world.prefill_backoff.check("a", A.epoch)


async def test_the_first_node_that_can_fills_the_prompt() -> None:
    world = TransferWorld({"a": None, "b": None})
    assert await world.run(A, B) == PrefillSource(node="a")
    assert world.attempts == [("a", 0)]
    assert (world.sequence.phase, world.sequence.received) == (Phase.WAITING, 99)
    assert world.node.scheduler.pool.counts().reserved == 0
    assert world.node.metric("tandem_transfer_bytes_total") == 1000


@pytest.mark.parametrize(
    ("cached_by_peer", "cached"), [(0, 0), (20, 0), (48, 16), (99, 67), (1 << 31, 67)]
)
async def test_received_tokens_that_the_prefill_node_had_count_as_cached(
    cached_by_peer: int, cached: int
) -> None:
    world = TransferWorld({"a": None})
    world.done = pb.OpenDone(cached_tokens=cached_by_peer)
    scheduler = world.node.scheduler
    scheduler.add(Sequence(0, list(range(33)), Generate(SamplingParams(max_tokens=1))))
    while (plan := scheduler.schedule()) is not None and rows_of(plan):
        scheduler.apply(StepResult(plan.step, {0: [5]}))
    source = await world.run(A)
    assert (world.sequence.cached, world.sequence.received) == (32, 67)
    assert source == PrefillSource(node="a", cached=cached)


def run_here(world: TransferWorld) -> None:
    """Compute the rest of the prompt, and draw a token."""
    scheduler = world.node.scheduler
    world.sequence.work = Generate(SamplingParams(max_tokens=1))
    while (plan := scheduler.schedule()) is not None:
        sampled = {row.sequence_id: [5] for row in rows_of(plan) if row.sample}
        scheduler.apply(StepResult(plan.step, sampled))


@pytest.mark.parametrize("greeted", [True, False])
async def test_of_other_weights_only_the_blocks_are_taken_that_a_repeated_prompt_finds(
    greeted: bool,
) -> None:
    """The tokens after them are computed here each time, whether or not the peer is known."""
    world = TransferWorld({"a": None})
    world.weight_format = "bfloat16"
    assert (await world.run(A)).node == "a"
    size = world.node.engine.resolved.block_size
    assert 99 % size
    count = 99 // size * size
    assert (world.sequence.computed, world.sequence.received) == (count, count)
    run_here(world)
    if not greeted:
        world.greeted.clear()
    world.sequence = Sequence(2, list(range(100)), Generate(SamplingParams()))
    assert (await world.run(A)).reason == "nothing missing"
    assert (world.sequence.cached, world.sequence.computed) == (count, count)
    assert world.sequence.received == 0 and world.attempts == [("a", 0)]
    run_here(world)
    assert world.node.held() == 0
    assert world.node.metric("tandem_transfer_bytes_total") == 1000


async def test_each_failure_is_another_attempt_with_the_next_node() -> None:
    world = TransferWorld({"a": PeerRefusedError("no"), "b": PeerLostError("gone"), "c": None})
    assert await world.run(A, B, C) == PrefillSource(node="c")
    assert world.attempts == [("b", 1), ("c", 2)]
    assert world.forgotten == ["b"]
    for number, outcome, cause in (
        ("1", "refused", "refused"),
        ("2", "failed", "peer_lost"),
        ("3+", "committed", ""),
    ):
        labels = {"attempt": number, "outcome": outcome, "cause": cause}
        assert world.node.metric("tandem_transfers_total", **labels) == 1


async def test_when_all_fail_the_prompt_is_prefilled_here() -> None:
    full = TransferError("full", cause=Cause.BUSY)
    world = TransferWorld({"a": TransferError("broken"), "b": full})
    assert (await world.run(A, B)).reason == "failed: busy"
    assert world.forgotten == []
    assert (world.sequence.phase, world.sequence.computed) == (Phase.WAITING, 0)
    assert world.node.held() == 0
    assert world.local("failed: busy") == 1


async def test_nothing_is_reserved_without_a_worthwhile_prefill_node() -> None:
    world = TransferWorld({"a": None})
    world.refused = {"a"}
    assert (await world.run(A)).reason == "all prefill nodes refused"
    assert (await TransferWorld({}).run()).reason == "no prefill node"
    assert (await TransferWorld({"a": None}, threshold=100).run(A)).reason == "below threshold"
    assert world.attempts == [] and world.local("all prefill nodes refused") == 1


async def test_a_node_with_a_long_queue_is_passed_over() -> None:
    world = TransferWorld({"a": None, "b": None}, threshold=None)
    world.node.core._prefill_rate.tokens_per_second = 1000.0
    busy = pb.PrefillCandidate(node_id="a", address="a", queued_prefill_tokens=10_000)
    assert await world.run(busy, B) == PrefillSource(node="b")
    world.sequence = Sequence(2, list(range(200, 300)), Generate(SamplingParams()))
    assert (await world.run(busy)).reason == "faster here"


async def test_a_prompt_in_mid_stream_does_not_queue_here() -> None:
    world = TransferWorld({"a": None}, threshold=None)
    world.node.core._prefill_rate.tokens_per_second = 1000.0
    for number in range(9):
        waiting = Sequence(10 + number, list(range(100)), Generate(SamplingParams()))
        world.node.core.enqueue(waiting)
    busy = pb.PrefillCandidate(node_id="a", address="a", queued_prefill_tokens=400)
    assert await world.run(busy) == PrefillSource(node="a")
    world.sequence = Sequence(2, list(range(200, 300)), Generate(SamplingParams()), mid_stream=True)
    assert (await world.run(busy)).reason == "faster here"


async def test_a_transfer_that_cannot_end_in_time_is_not_started() -> None:
    world = TransferWorld({"a": None})
    world.seconds = 1.5
    slow = pb.PrefillCandidate(node_id="a", address="a", prefill_tokens_per_second=50)
    assert (await world.run(slow)).reason == "too late there"
    assert world.attempts == [] and world.local("too late there") == 1


def _lost(*, computing: bool) -> TransferError:
    return PeerLostError("gone", computing=computing)


async def test_a_prompt_that_ended_two_processes_is_given_up() -> None:
    """Neither the third candidate nor this node computes it."""
    died = TransferError("running: its rank ended", cause=Cause.DIED)
    world = TransferWorld({"a": died, "b": _lost(computing=True), "c": None})
    world.dead = {"b"}
    with pytest.raises(GivenUpError, match="2 processes ended while they computed"):
        await world.run(A, B, C)
    assert world.attempts == [("a", 0), ("b", 1)]
    assert world.sequence.phase is Phase.FINISHED and world.node.held() == 0
    deaths = [world.deaths.events.get_nowait() for _ in range(world.deaths.events.qsize())]
    assert [event.prefill_died.node_id for event in deaths if event] == ["a", "b"]


async def test_deaths_on_other_nodes_count_too() -> None:
    world = TransferWorld({"a": TransferError("its rank ended", cause=Cause.DIED), "b": None})
    world.deaths = PromptDeaths(1)
    with pytest.raises(GivenUpError):
        await world.run(A, B)
    assert world.attempts == [("a", 0)]


@pytest.mark.parametrize(
    ("error", "is_dead"),
    [
        (_lost(computing=True), False),  # a broken connection to a process that lives
        (_lost(computing=False), True),  # before it had the prompt
        (TransferError("silent", cause=Cause.TIMEOUT_PROGRESS), True),
        (TransferError("not finite", cause=Cause.COMPUTE), True),
    ],
)
async def test_failures_unrelated_to_the_prompt_are_no_deaths(
    error: TransferError, is_dead: bool
) -> None:
    world = TransferWorld({"a": error, "b": error, "c": None})
    world.dead = {"a", "b"} if is_dead else set()
    assert await world.run(A, B, C) == PrefillSource(node="c")
    assert world.deaths.events.empty()


async def test_a_cancelled_request_gives_its_reservation_back() -> None:
    world = TransferWorld({"a": TimeoutError()})
    task = asyncio.create_task(world.run(A))
    while not world.attempts:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert world.node.held() > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.node.held() == 0
    assert world.sequence.phase is Phase.FINISHED
    assert world.node.metric("tandem_transfers_live") == 0


@contextlib.asynccontextmanager
async def waiting_for_blocks(
    world: TransferWorld,
) -> AsyncIterator[tuple[asyncio.Task[PrefillSource], Callable[[], None]]]:
    """A prompt that waits for blocks, and a function that frees them."""
    scheduler = world.node.scheduler
    async with world.node.running():
        blocks = scheduler.pool.allocate(60)

        def give_back() -> None:
            scheduler.pool.release(blocks)
            world.node.core._wake()

        filling = asyncio.create_task(world.run(A))
        await until(lambda: scheduler.reservations.asking)
        yield filling, give_back
        world.node.core.cancel(world.sequence)


async def test_a_prompt_waits_in_turn_for_the_blocks_of_its_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = TransferWorld({"a": None})
    async with waiting_for_blocks(world) as (filling, give_back):
        assert world.attempts == []
        waits: list[float] = []
        world.node.core.on_started = waits.append
        pausing(monkeypatch)(2.0)
        give_back()
        source = await filling
        assert source.node == "a"
        assert source.clock.durations.queue_seconds > 0
        await until(lambda: bool(waits))
        assert waits[0] >= 2.0


async def test_the_choice_is_made_again_after_waiting_for_blocks() -> None:
    world = TransferWorld({"a": None})
    async with waiting_for_blocks(world) as (filling, give_back):
        world.refused.add("a")
        give_back()
        assert (await filling).reason == "all prefill nodes refused"
        assert world.attempts == []


async def test_a_prompt_that_waits_for_blocks_may_be_cancelled_and_hears_of_lost_ranks() -> None:
    world, other = TransferWorld({"a": None}), TransferWorld({"a": None})
    for one in (world, other):
        one.node.scheduler.pool.allocate(60)
    filling, lost = (asyncio.create_task(one.run(A)) for one in (world, other))
    await until(lambda: all(one.node.scheduler.reservations.asking for one in (world, other)))
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert world.sequence.phase is Phase.FINISHED and world.node.scheduler.idle
    other.node.core._fail("rank 0 is gone")
    with pytest.raises(UnavailableError, match="rank 0 is gone"):
        await lost
