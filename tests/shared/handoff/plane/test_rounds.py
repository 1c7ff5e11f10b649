"""Rounds of the loop that handle only what has come."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.shared.handoff.plane import loop as module
from tandem.shared.handoff.plane.messages import (
    Expecting,
    PeerLost,
    Received,
    SendFailed,
    SendFinished,
)
from tandem.shared.kv.copying import Copying
from tandem.tests.shared.handoff.support.by_hand import HandRank, World
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    BLOCKS,
    CELL,
    LAYERS,
    PATIENT,
    WAIT_SECONDS,
    expect,
)
from tandem.tests.support.layers_ready import layer_ready

SPAN = {"first_token": 0, "end_token": BLOCK}  # of one frame


class Pair:
    """Two ranks that have met for transfer 1, and the turns that they have taken since."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        # A busy machine may keep acknowledgements for longer than a tick.
        monkeypatch.setattr(module, "TICK_SECONDS", WAIT_SECONDS)
        self.prefill = world.rank("p", seed=1, timing=PATIENT)
        self.decode = world.rank("d", listen_host=None, timing=PATIENT)
        self.ranks = (self.prefill, self.decode)
        for rank in self.ranks:
            rank.plane._commands.open()
        self.decode.plane.submit(expect(self.prefill, 1, BLOCKS, **SPAN))
        world.until(lambda: bool(self.decode.log.of(Expecting)))
        world.turn(100)  # both have heard all about the connection
        self.turns: Counter[str] = Counter()
        for rank in self.ranks:
            self._count(rank, monkeypatch)

    def _count(self, rank: HandRank, monkeypatch: pytest.MonkeyPatch) -> None:
        turn, name = rank.loop.turn, rank.config.node_id

        def counted() -> None:
            self.turns[name] += 1
            turn()

        monkeypatch.setattr(rank.loop, "turn", counted)

    def send(self, attempt: int = 1, layers: int = LAYERS) -> None:
        self.prefill.open(self.decode, 1, BLOCKS, attempt=attempt, **SPAN)
        layer_ready(self.prefill.plane, 1, attempt, 0, 0, BLOCK, layers)
        self.prefill.loop.round()

    def send_rest(self, first: int) -> None:
        layer_ready(self.prefill.plane, 1, 1, first, 0, BLOCK, LAYERS)
        self.prefill.loop.round()

    def finish(self) -> None:
        while not self.decode.log.of(Received):
            self.decode.loop.round()
        while not self.prefill.log.of(SendFinished):
            self.prefill.loop.round()

    @property
    def sent(self) -> int:
        return self.prefill.plane.stats().frames_sent

    @property
    def polled(self) -> set[Any]:
        """The sockets for which the sender waits."""
        return {each for each, _ in self.prefill.loop._current_poller().sockets}


class LatePacking:
    """A ``Wait`` that is over when the test says so."""

    def __init__(self, prefill: HandRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        self.waits = 0
        pack = prefill.cache.pack_frame

        def pack_frame(*args: Any) -> Copying:
            pack(*args)
            return Copying(self)

        monkeypatch.setattr(prefill.cache, "pack_frame", pack_frame)

    def __call__(self) -> None:
        self.waits += 1
        assert self.event.wait(WAIT_SECONDS)

    def is_over(self) -> bool:
        return self.event.is_set()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with World("shared_memory") as world:
        made = Pair(world, monkeypatch)
        yield made
        for rank in made.ranks:
            rank.plane._commands.close()


def test_a_transfer_leaves_all_else_alone(pair: Pair) -> None:
    pair.send()
    pair.decode.loop.round()
    assert pair.decode.log.of(Received)
    while not pair.prefill.log.of(SendFinished):
        pair.prefill.loop.round()
    assert not pair.turns


def test_only_a_sender_without_slots_wakes_for_one(pair: Pair) -> None:
    loop = pair.prefill.loop
    loans = set(loop._listener.loan_sockets())
    assert loans and not loans & pair.polled
    loop._listener.slots_for = lambda peer: 0  # type: ignore[method-assign]
    pair.send()
    assert loans <= pair.polled


def test_nobody_waits_for_acknowledgements_while_layers_are_to_come(pair: Pair) -> None:
    listener = pair.prefill.loop._listener
    replies = set(listener.reply_sockets()) - set(listener.loan_sockets())
    assert replies and replies <= pair.polled  # nothing is on its way
    pair.send(layers=1)
    assert pair.sent == 1 and not replies & pair.polled
    listener._half_open[7] = None  # type: ignore[attr-defined]
    assert replies <= pair.polled  # a peer greets
    del listener._half_open[7]  # type: ignore[attr-defined]
    pair.send_rest(1)
    assert replies <= pair.polled  # of the end
    pair.finish()
    assert not pair.turns


def test_a_sender_without_credit_waits_for_acknowledgements(pair: Pair) -> None:
    replies = set(pair.prefill.loop._listener.reply_sockets())
    frame = BLOCK * CELL
    pair.prefill.open(pair.decode, 1, BLOCKS, window_bytes=2 * frame, **SPAN)
    for layer in range(2):
        layer_ready(pair.prefill.plane, 1, 1, layer, 0, BLOCK)
        pair.prefill.loop.round()
        assert not replies & pair.polled
    pair.send_rest(2)
    assert pair.sent == 2 and replies & pair.polled


def test_a_packed_frame_leaves_with_what_comes_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PACKED_SECONDS", WAIT_SECONDS)
    packing = LatePacking(pair.prefill, monkeypatch)
    pair.send(layers=1)
    packing.event.set()
    assert pair.sent == 0
    pair.send_rest(1)
    assert pair.sent == 2 and not packing.waits
    pair.finish()
    assert not pair.turns


def test_a_packed_frame_does_not_wait_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = LatePacking(pair.prefill, monkeypatch)
    pair.send(layers=1)
    pair.prefill.loop.round()
    assert pair.sent == 0
    packing.event.set()
    pair.prefill.loop.round()
    assert pair.sent == 1 and not packing.waits and not pair.turns


def test_a_copy_that_fails_ends_its_transfer_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> bool:
        raise RuntimeError("an illegal memory access")

    packing = LatePacking(pair.prefill, monkeypatch)
    pair.send(layers=1)
    monkeypatch.setattr(packing, "is_over", fails)
    pair.prefill.loop.round()
    (failed,) = pair.prefill.log.of(SendFailed)
    assert "packing failed: RuntimeError('an illegal" in failed.reason


def test_the_last_frame_leaves_as_soon_as_it_is_packed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PACKED_SECONDS", WAIT_SECONDS)
    packing = LatePacking(pair.prefill, monkeypatch)
    pair.send()
    assert pair.sent == 0
    threading.Timer(0.01, packing.event.set).start()
    while not pair.sent:
        pair.prefill.loop.round()  # ends with the wake
    assert packing.waits == 1
    pair.finish()
    assert not pair.turns


def test_a_lost_peer_is_reported_by_the_round_that_finds_it(pair: Pair) -> None:
    loop = pair.prefill.loop
    loop._listener.slots_for = lambda peer: 0  # type: ignore[method-assign]
    pair.send()
    pair.decode.kill()
    loop.round()
    assert pair.prefill.log.of(PeerLost) and pair.turns["p"] == 1


def test_a_frame_of_a_new_attempt_comes_after_its_command(pair: Pair) -> None:
    pair.send(attempt=2)
    pair.decode.plane.submit(expect(pair.prefill, 1, BLOCKS, attempt=2, **SPAN))
    pair.decode.loop.round()
    assert pair.decode.log.of(Received) and not pair.decode.plane.stats().frames_stale
