"""Rounds of the loop that handle only what has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tandem.shared.handoff.plane.messages import Expecting, PeerLost, Received, SendFinished
from tandem.tests.shared.handoff.support.by_hand import HandRank, World
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    BLOCKS,
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
        monkeypatch.setattr("tandem.shared.handoff.plane.loop.TICK_SECONDS", WAIT_SECONDS)
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

    def send(self, attempt: int = 1) -> None:
        self.prefill.open(self.decode, 1, BLOCKS, attempt=attempt, **SPAN)
        layer_ready(self.prefill.plane, 1, attempt, 0, 0, BLOCK, LAYERS)
        self.prefill.loop.round()


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

    def polled() -> set[object]:
        return {each for each, _ in loop._current_poller().sockets}

    assert loans and not loans & polled()
    loop._listener.slots_for = lambda peer: 0  # type: ignore[method-assign]
    pair.send()
    assert loans <= polled()


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
