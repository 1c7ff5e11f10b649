"""The contract of a carrier between two data planes, which are stepped by hand: each passes this
suite unchanged."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    CancelSend,
    Expecting,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from tandem.tests.shared.handoff.support.by_hand import CARRIERS, HandRank, World
from tandem.tests.shared.handoff.support.plane_pair import BLOCK, CELL, LAYERS, expect, rows, until

END = 100
BLOCKS = tuple(range(13))
QUICK = Timing(ping_seconds=0.1, silence_seconds=0.5)


@pytest.fixture(params=CARRIERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param) as world:
        yield world


def _planes(world: World, **config: Any) -> tuple[HandRank, HandRank]:
    return world.rank("p", seed=1, **config), world.rank("d", listen_host=None, **config)


@pytest.mark.parametrize("end", [1, 2, BLOCK + 1, 200])
def test_a_transfer_arrives_whole(world: World, end: int) -> None:
    prefill, decode = _planes(world)
    table = tuple(range(-(-end // BLOCK)))
    world.transfer(prefill, decode, 1, table, first_token=0, end_token=end)
    world.until(lambda: bool(prefill.log.of(SendFinished) and decode.log.of(Received)))
    assert decode.log.of(Received)[0].bytes == LAYERS * CELL * end
    assert rows(decode.cache, table, 0, end) == rows(prefill.cache, table, 0, end)


def test_an_empty_transfer_is_refused_on_both_sides(world: World) -> None:
    prefill, decode = _planes(world)
    decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=5, end_token=5))
    prefill.open(decode, 1, BLOCKS, first_token=5, end_token=5)
    world.turn()
    for rank, kind in ((prefill, SendFailed), (decode, ReceiveFailed)):
        event: Any = rank.log.of(kind)[0]
        assert "tokens [5, 5) are an invalid range" in event.reason


@pytest.mark.parametrize("window", [2 * CELL, 1000, 5000])
def test_never_more_than_the_window_is_in_flight(world: World, window: int) -> None:
    prefill, decode = _planes(world)
    fields = {"first_token": 0, "end_token": END, "window_bytes": window}
    world.transfer(prefill, decode, 1, BLOCKS, **fields)
    peak = 0

    def turn() -> None:
        nonlocal peak
        prefill.turn()
        in_flight = prefill.plane.stats().bytes_sent - decode.plane.stats().bytes_received
        peak = max(peak, in_flight, prefill.plane.stats().credit_in_flight)
        world.turn()

    world.until(lambda: bool(prefill.log.of(SendFinished)), turn)
    assert window // 4 < peak <= window


def test_a_thousand_small_transfers(world: World) -> None:
    prefill, decode = _planes(world)
    total = 1000
    for number in range(total):
        world.transfer(prefill, decode, number, (number % 64,), first_token=0, end_token=2)
        world.turn()
    world.until(lambda: len(prefill.log.of(SendFinished)) == total, seconds=60)
    assert sorted(event.transfer_id for event in decode.log.of(Received)) == list(range(total))
    world.until(lambda: prefill.plane.stats().held_slots == 0)


def test_a_restarted_receiver_gets_nothing_of_the_old_one(world: World) -> None:
    prefill, decode = _planes(world, timing=QUICK)
    world.transfer(prefill, decode, 1, BLOCKS, first_token=0, end_token=END)
    world.until(lambda: decode.plane.stats().frames_received > 0)
    decode.kill()
    again = world.rank("d", listen_host=None, timing=QUICK)
    before = [bytes(layer) for layer in again.cache.layers]
    world.until(lambda: bool(prefill.log.of(SendFailed)))
    assert [bytes(layer) for layer in again.cache.layers] == before
    world.transfer(prefill, again, 2, BLOCKS, first_token=0, end_token=END)
    world.until(lambda: bool(prefill.log.of(SendFinished)))
    assert rows(again.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def test_a_restarted_sender_is_another_one(world: World) -> None:
    prefill, decode = _planes(world, timing=QUICK)
    world.transfer(prefill, decode, 1, BLOCKS, first_token=0, end_token=END)
    world.until(lambda: decode.plane.stats().frames_received > 0)
    prefill.kill()
    again = world.rank("p", seed=3, timing=QUICK)
    world.until(lambda: bool(decode.log.of(ReceiveFailed)))
    assert decode.log.of(ReceiveFailed)[0].retriable
    stale = expect(again, 2, BLOCKS, first_token=0, end_token=END, peer_epoch=prefill.config.epoch)
    decode.plane.submit(stale)
    world.until(lambda: len(decode.log.of(ReceiveFailed)) == 2)
    assert not decode.log.of(ReceiveFailed)[1].retriable
    world.transfer(again, decode, 3, BLOCKS, first_token=0, end_token=END)
    world.until(lambda: bool(again.log.of(SendFinished)))
    assert rows(decode.cache, BLOCKS, 0, END) == rows(again.cache, BLOCKS, 0, END)


@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_cancel_frees_both_sides_within_a_second(world: World, side: str) -> None:
    prefill, decode = _planes(world)
    decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
    world.until(lambda: bool(decode.log.of(Expecting)))
    prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
    prefill.compute(1, 0, 50, chunk=10)
    world.until(lambda: decode.plane.stats().frames_received > 0)
    start = world.clock()
    if side == "send":
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
    else:
        decode.plane.submit(CancelExpect(transfer_id=1, attempt=1))
    world.until(
        lambda: prefill.plane.stats().active_sends == decode.plane.stats().active_receives == 0
    )
    world.until(lambda: prefill.plane.stats().held_slots == 0)
    assert world.clock() - start < 1


def _held_bytes() -> dict[str, int]:
    """Memory that the handoff's code has allocated and still holds, by line."""
    gc.collect()
    of = tracemalloc.Filter(True, "*/shared/handoff/*")
    lines = tracemalloc.take_snapshot().filter_traces([of]).statistics("lineno")
    return {str(line.traceback): line.size for line in lines}


def _open() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _one_life(carrier: str) -> None:
    with World(carrier) as world:
        prefill, decode = _planes(world, slot_bytes=1 << 16)
        world.transfer(prefill, decode, 1, BLOCKS, first_token=0, end_token=END)
        world.until(lambda: bool(prefill.log.of(SendFinished)))
        world.transfer(prefill, decode, 2, BLOCKS, first_token=0, end_token=END)
        world.turn(3)  # and one is under way when it ends


@pytest.mark.parametrize("carrier", CARRIERS)
def test_closed_planes_leave_no_memory_descriptors_or_threads(carrier: str) -> None:
    _one_life(carrier)
    descriptors, threads = _open()
    tracemalloc.start()
    try:
        for _ in range(3):
            _one_life(carrier)
        usage = _held_bytes()
    finally:
        tracemalloc.stop()
    assert sum(usage.values()) < 1 << 16, usage  # less than a cache, which every part refers to
    # Others in this process may have let go of theirs meanwhile.
    until(
        lambda: all(now <= then for now, then in zip(_open(), (descriptors, threads), strict=True))
    )
