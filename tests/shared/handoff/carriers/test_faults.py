"""Faults of messages: a transfer ends with the right bytes or fails, and then holds nothing."""

from __future__ import annotations

import pytest

from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    CancelSend,
    Expecting,
    PeerLost,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from tandem.tests.shared.handoff.support.by_hand import CARRIERS, HandRank, World
from tandem.tests.shared.handoff.support.faults import Fault, Schedule
from tandem.tests.shared.handoff.support.memory_transport import MEMORY
from tandem.tests.shared.handoff.support.plane_pair import BLOCK, expect, rows

END = 100
BLOCKS = tuple(range(-(-END // BLOCK)))
QUICK = Timing(ping_seconds=0.1, silence_seconds=0.5)


def _pair(world: World) -> tuple[HandRank, HandRank]:
    prefill = world.rank("p", seed=1, timing=QUICK)
    return prefill, world.rank("d", listen_host=None, timing=QUICK)


def _greeted(world: World, prefill: HandRank, decode: HandRank) -> None:
    """Greet, and open a transfer of which nothing is computed."""
    fields = {"first_token": 0, "end_token": END, "progress_seconds": 1.0}
    decode.plane.submit(expect(prefill, 1, BLOCKS, **fields))
    world.until(lambda: bool(decode.log.of(Expecting)))
    prefill.open(decode, 1, BLOCKS, **fields)


def _on_first_frame(world: World, prefill: HandRank, schedule: Schedule, fault: Fault) -> None:
    """Step the prefill rank alone, so that its first message is the first frame; it leaves once the
    peer's choice of a carrier has arrived."""
    schedule.planned.append(fault)
    prefill.compute(1, 0, END, chunk=END)

    def turn() -> None:
        prefill.turn()
        world.pass_time()

    world.until(lambda: schedule.happened[fault] == 1, turn)


def _settle(world: World, prefill: HandRank, decode: HandRank) -> None:
    """Step until both sides have reported the end, and every slot is free."""
    world.until(lambda: bool(prefill.log.of(SendFinished) or prefill.log.of(SendFailed)))
    world.until(lambda: bool(decode.log.of(Received) or decode.log.of(ReceiveFailed)))
    world.until(lambda: prefill.plane.stats().held_slots == 0)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.DROP, "expected frame 0, got frame 1"),
        (Fault.REORDER, "expected frame 0, got frame 1"),
        (Fault.DUPLICATE, "expected frame 1, got frame 0"),
        (Fault.RESET, "lost"),
    ],
)
def test_a_fault_on_the_first_frame_fails_the_attempt_by_name(
    carrier: str, fault: Fault, reason: str
) -> None:
    schedule = Schedule()
    with World(carrier, schedule) as world:
        prefill, decode = _pair(world)
        _greeted(world, prefill, decode)
        _on_first_frame(world, prefill, schedule, fault)
        _settle(world, prefill, decode)
        assert reason in decode.log.of(ReceiveFailed)[0].reason
        assert decode.log.of(ReceiveFailed)[0].retriable


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TRUNCATE])
def test_a_damaged_frame_is_never_accepted(carrier: str, fault: Fault) -> None:
    schedule = Schedule(seed=5)
    with World(carrier, schedule) as world:
        prefill, decode = _pair(world)
        before = [bytes(layer) for layer in decode.cache.layers]
        _greeted(world, prefill, decode)
        _on_first_frame(world, prefill, schedule, fault)
        _settle(world, prefill, decode)
        assert not decode.log.of(Received)
        assert [bytes(layer) for layer in decode.cache.layers] == before


@pytest.mark.parametrize("carrier", CARRIERS)
def test_late_and_slow_messages_still_make_a_transfer(carrier: str) -> None:
    with World(carrier, Schedule(3, {Fault.DELAY: 0.2}, bytes_a_second=1e6)) as world:
        prefill, decode = _pair(world)
        _greeted(world, prefill, decode)
        prefill.compute(1, 0, END, chunk=END)
        _settle(world, prefill, decode)
        assert rows(decode.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def test_a_transfer_that_moves_slowly_is_not_given_up() -> None:
    """It takes four seconds, and a quarter of the window is more than all of it."""
    with World(MEMORY, Schedule(bytes_a_second=5e3)) as world:
        prefill, decode = _pair(world)
        _greeted(world, prefill, decode)
        prefill.compute(1, 0, END, chunk=10)
        _settle(world, prefill, decode)
        assert decode.log.of(Received), decode.log.of(ReceiveFailed)


@pytest.mark.parametrize(
    ("carrier", "first"), [*((carrier, 7) for carrier in CARRIERS), (MEMORY, 1), (MEMORY, 49)]
)
def test_a_computation_that_pauses_in_the_middle_costs_nothing(carrier: str, first: int) -> None:
    """Arrived frames are acknowledged without another frame: however long the rest takes to
    compute, nothing is in flight, and the sender does not wait for the receiver."""
    with World(carrier) as world:
        prefill, decode = _pair(world)
        _greeted(world, prefill, decode)
        prefill.compute(1, 0, first, chunk=first)
        world.until(lambda: decode.plane.stats().frames_received > 0)
        world.until(lambda: prefill.plane.stats().credit_in_flight == 0)
        paused_until = world.clock() + (250.0 if world.memory else 1.5)
        while world.clock() < paused_until:
            world.turn()
            world.pass_time(0.2)
        prefill.compute(1, first, END, chunk=33)
        _settle(world, prefill, decode)
        assert decode.log.of(Received), decode.log.of(ReceiveFailed)


def test_a_computation_that_has_not_begun_costs_nothing() -> None:
    with World(MEMORY) as world:
        prefill, decode = _pair(world)
        _greeted(world, prefill, decode)
        world.turn(10)
        for _ in range(250):
            world.turn()
            world.pass_time(0.2)
        assert prefill.plane.stats().active_sends == 1
        prefill.compute(1, 0, END, chunk=END)
        _settle(world, prefill, decode)
        assert decode.log.of(Received), decode.log.of(ReceiveFailed)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_that_dies_or_hangs_is_lost_within_three_seconds(side: str, hangs: bool) -> None:
    """With the intervals of pings and silence that planes have by default."""
    with World(MEMORY) as world:
        prefill = world.rank("p", seed=1, timing=Timing())
        decode = world.rank("d", listen_host=None, timing=Timing())
        _greeted(world, prefill, decode)
        prefill.compute(1, 0, 50, chunk=50)
        world.until(lambda: decode.plane.stats().frames_received > 0)
        lost, other = (prefill, decode) if side == "prefill" else (decode, prefill)
        world.ranks.remove(lost)
        if not hangs:
            lost.kill()
        failure = ReceiveFailed if side == "prefill" else SendFailed
        world.until(lambda: bool(other.log.of(failure) and other.log.of(PeerLost)), seconds=3)


def test_a_transfer_that_waits_for_its_turn_on_a_slow_link_is_not_given_up() -> None:
    """Each of thirty transfers gets a frame now and then, while the link is always busy."""
    with World(MEMORY, Schedule(bytes_a_second=2e4)) as world:
        prefill, decode = _pair(world)
        fields = {"first_token": 0, "end_token": END}
        for number in range(30):
            decode.plane.submit(expect(prefill, number, BLOCKS, **fields))
            prefill.open(decode, number, BLOCKS, progress_seconds=1.0, **fields)
            prefill.compute(number, 0, END, chunk=END)

        def turn() -> None:
            world.turn()
            world.pass_time(0.02)

        world.until(lambda: len(_outcomes(decode)) == 30, turn, seconds=120)
        assert len(decode.log.of(Received)) == 30, decode.log.of(ReceiveFailed)[0]


def test_a_loss_not_yet_reported_does_not_end_the_next_attempt() -> None:
    fields = {"first_token": 0, "end_token": END}
    with World("memory") as world:
        prefill, decode = _pair(world)
        _greeted(world, prefill, decode)
        world.network.wires[0].close()
        # The cancel finds the connection broken, and the next attempt follows at once.
        decode.plane.submit(CancelExpect(transfer_id=1, attempt=1))
        decode.plane.submit(expect(prefill, 2, BLOCKS, **fields))
        world.until(lambda: len(decode.log.of(Expecting)) == 2)
        assert decode.log.of(ReceiveFailed) == []
        prefill.open(decode, 2, BLOCKS, **fields)
        prefill.compute(2, 0, END, chunk=33)
        world.until(lambda: bool(decode.log.of(Received)))


def test_a_receiver_that_reads_nothing_leaves_slots_for_another() -> None:
    """Its credit is for more than the whole ring."""
    fields = {"first_token": 0, "end_token": END}
    with World("memory") as world:
        prefill, slow = _pair(world)
        other = world.rank("other", listen_host=None, timing=QUICK)
        _greeted(world, prefill, slow)
        prefill.compute(1, 0, END, chunk=END)
        world.ranks.remove(slow)  # it has no more turns
        world.transfer(prefill, other, 2, BLOCKS, **fields)
        world.until(lambda: bool(prefill.log.of(SendFinished)), seconds=QUICK.silence_seconds / 2)
        assert prefill.log.of(SendFinished)[0].transfer_id == 2
        world.ranks.append(slow)
        world.until(lambda: bool(slow.log.of(Received) or slow.log.of(ReceiveFailed)))


def _campaign(carrier: str, seed: int, transfers: int) -> tuple[int, Schedule]:
    """Run overlapping transfers with random faults; returns how many arrived."""
    rates = dict.fromkeys(Fault, 0.004) | {Fault.RESET: 0.001}
    schedule = Schedule(seed, rates)
    schedule.delay_seconds = 0.05
    source = schedule.random
    with World(carrier, schedule) as world:
        prefill, decode = _pair(world)
        for number in range(transfers):
            fields = {"first_token": source.randrange(5), "end_token": source.randrange(6, END)}
            window = {"window_bytes": source.choice([1000, 5000, 1 << 20])}
            limits = {"progress_seconds": 0.5}
            decode.plane.submit(
                expect(prefill, number, BLOCKS, deadline_seconds=1.0, **fields, **window, **limits)
            )
            prefill.open(decode, number, BLOCKS, **fields, **window, **limits)
            prefill.compute(number, 0, fields["end_token"], chunk=33)
            world.until(lambda number=number: len(_outcomes(decode)) > number)  # type: ignore[misc]
            if decode.log.of(Received) and decode.log.of(Received)[-1].transfer_id == number:
                span = fields["first_token"], fields["end_token"]
                assert rows(decode.cache, BLOCKS, *span) == rows(prefill.cache, BLOCKS, *span)
            prefill.plane.submit(CancelSend(transfer_id=number, attempt=1))
            decode.plane.submit(CancelExpect(transfer_id=number, attempt=1))
        schedule.quiet()
        world.until(lambda: prefill.plane.stats().held_slots == 0)
        finished = {event.transfer_id for event in prefill.log.of(SendFinished)}
        received = {event.transfer_id for event in decode.log.of(Received)}
        assert finished <= received
        return len(received), schedule


def _outcomes(decode: HandRank) -> set[int]:
    return {event.transfer_id for event in decode.log.of(Received) + decode.log.of(ReceiveFailed)}


@pytest.mark.parametrize(
    ("carrier", "transfers"),
    [("memory", 100), ("tcp", 40), ("shared_memory", 40), ("cuda_ipc", 40)],
)
def test_a_campaign_of_random_faults(carrier: str, transfers: int) -> None:
    received, schedule = _campaign(carrier, 1, transfers)
    assert received > transfers // 4
    assert sum(schedule.happened.values()) > transfers // 4


def test_a_seed_gives_the_same_faults_again() -> None:
    one, two = (_campaign("memory", 7, 40) for _ in range(2))
    assert one[0] == two[0]
    assert one[1].happened == two[1].happened
