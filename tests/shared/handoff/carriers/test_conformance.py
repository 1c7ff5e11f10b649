"""The contract of a carrier at the two ends of a connection: each passes this suite unchanged.

The test steps both ends by hand; ``test_conformance_of_planes.py`` steps two data planes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.shared.handoff.carriers.base import SendHandle
from tandem.shared.handoff.carriers.staging import RingSlot
from tandem.shared.handoff.carriers.transport import Joined, Lost, Notice, PeerGoneError
from tandem.shared.handoff.carriers.zeromq.curve import OVERHEAD_BYTES
from tandem.shared.handoff.carriers.zeromq.sockets import MAX_CONTROL_MESSAGE, Timing
from tandem.shared.handoff.plane.messages import PeerJoined, PeerLost
from tandem.shared.handoff.wire.frame import HEADER_BYTES, Message, parts_of
from tandem.shared.handoff.wire.greeting import PeerKey
from tandem.tests.shared.handoff.support.by_hand import CARRIERS, HandRank, World
from tandem.tests.shared.handoff.support.fake_driver import as_memory
from tandem.tests.shared.handoff.support.plane_pair import HEAD_BYTES, make_cache

# Both sides take what CURVE adds to a message, locked or not.
TOO_LONG = MAX_CONTROL_MESSAGE + OVERHEAD_BYTES + 1
QUICK = Timing(ping_seconds=0.1, silence_seconds=0.5)


@pytest.fixture(params=CARRIERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param) as world:
        yield world


def _key(rank: HandRank) -> PeerKey:
    return PeerKey(node_id=rank.config.node_id, epoch=rank.config.epoch, rank=rank.config.rank)


def paint(slot: RingSlot, fill: bytes) -> None:
    """Fill a slot with one byte."""
    for part in (slot.head, as_memory(slot.payload)):
        part[:] = fill * len(part)


def whole(message: Message) -> bytes:
    return b"".join(bytes(as_memory(part)) for part in parts_of(message))


class ConnectedEnds:
    """A listener and a dialer that the test drives."""

    def __init__(self, world: World, **config: Any) -> None:
        self.world = world
        self.prefill = world.rank("p", **config)
        self.decode = world.rank("d", listen_host=None, **config)
        self.listener, self.dialer = self.prefill.loop._listener, self.decode.loop._dialer
        self.ring = self.prefill.loop._carriers.ring_of(world.carrier)
        self.slots_in_use: list[RingSlot] = []
        world.stack.callback(self.release)
        self.at_listener: list[Notice] = []
        self.at_dialer: list[Notice] = []
        self.to_listener: list[bytes] = []
        self.to_dialer: list[bytes] = []

    def dial(self, **changes: Any) -> PeerKey:
        peer = _key(self.prefill)._replace(**changes)
        self.dialer.connect(peer, self.prefill.plane.endpoints, self.world.clock())
        return peer

    def turn(self, *, listener: bool = True, dialer: bool = True) -> None:
        """Control and notices of one end or both; no bulk frame is read."""
        now = self.world.clock()
        if listener:
            self.to_listener += [message for _, message in self.listener.receive_control(now)]
            self.at_listener += self.listener.notices(now)
        if dialer:
            self.to_dialer += [message for _, message in self.dialer.receive_control(now)]
            self.at_dialer += self.dialer.notices(now)
        self.world.pass_time()

    def until(self, condition: Callable[[], bool], **which: bool) -> None:
        self.world.until(condition, lambda: self.turn(**which))

    def joined(self) -> ConnectedEnds:
        peer = self.dial()
        self.until(lambda: self.listener.is_live(_key(self.decode)) and self.dialer.is_live(peer))
        self.turn()
        return self

    def send(self, fill: bytes) -> tuple[RingSlot, SendHandle]:
        """One full frame out of a slot of the ring."""
        slot = self.ring.acquire()
        assert slot is not None
        self.slots_in_use.append(slot)
        paint(slot, fill)
        message = slot.message(self.ring.payload_bytes)
        return slot, self.listener.send_bulk(_key(self.decode), message, slot.offset)

    def release(self) -> None:
        """Give back every slot."""
        while self.slots_in_use:
            self.ring.release(self.slots_in_use.pop())

    def take(self) -> bytes:
        """The next bulk frame."""
        frames: list[bytes] = []

        def read() -> None:
            frame = self.dialer.receive_bulk(self.world.clock())
            if frame is not None:
                assert frame[0] == _key(self.prefill)
                frames.append(whole(frame[1]))
            self.turn()

        self.world.until(lambda: bool(frames), read)
        return frames[0]


@pytest.fixture
def pair(world: World) -> ConnectedEnds:
    return ConnectedEnds(world).joined()


def test_a_greeting_joins_both_ends(pair: ConnectedEnds) -> None:
    name = pair.world.carrier
    assert pair.at_listener == [Joined(_key(pair.decode), name)]
    assert pair.at_dialer == [Joined(_key(pair.prefill), name)]
    assert pair.listener.live() == pair.dialer.live() == {name: 1}
    pair.dial()  # again changes nothing
    pair.turn()
    assert len(pair.at_listener) == len(pair.at_dialer) == 1


def test_no_peer_is_live_before_the_greeting(world: World) -> None:
    pair = ConnectedEnds(world)
    peer = pair.dial()
    assert not pair.dialer.is_live(peer) and not pair.listener.is_live(_key(pair.decode))
    with pytest.raises(PeerGoneError):
        pair.dialer.send_control(peer, b"x")
    with pytest.raises(PeerGoneError):
        pair.send(b"x")


def test_a_refusal_names_the_field_and_is_final(world: World) -> None:
    prefill = world.rank("p")
    decode = world.rank("d", listen_host=None, cache=make_cache(head_bytes=HEAD_BYTES // 2))
    now = world.clock()
    decode.loop._dialer.connect(_key(prefill), prefill.plane.endpoints, now)
    world.until(lambda: bool(decode.log.of(PeerLost)))
    (lost,) = decode.log.of(PeerLost)
    assert "KV of layer 0: here K 8, V 8, at d K 4, V 4" in lost.reason and lost.cause == "refused"
    assert not prefill.log.of(PeerJoined)


def test_another_start_of_the_listener_is_refused_by_its_epoch(world: World) -> None:
    pair = ConnectedEnds(world)
    pair.dial(epoch=0x3039)
    pair.until(lambda: bool(pair.at_dialer))
    (lost,) = pair.at_dialer
    assert isinstance(lost, Lost) and lost.refused
    assert "epoch: p was 0000000000003039" in lost.reason


def test_an_unreachable_address_loses_the_peer_in_time(world: World) -> None:
    pair = ConnectedEnds(world, timing=QUICK)
    pair.prefill.kill()
    peer = pair.dial()
    pair.until(lambda: bool(pair.at_dialer), listener=False)
    (lost,) = pair.at_dialer
    assert isinstance(lost, Lost) and lost.peer == peer and not lost.refused


def test_bulk_frames_keep_their_order_and_their_bytes(pair: ConnectedEnds) -> None:
    for start in range(0, 40, 8):
        pending = [pair.send(bytes([start + i])) for i in range(8)]
        for i in range(8):
            assert set(pair.take()) == {start + i}
        pair.dialer.receive_bulk(pair.world.clock())  # the last view is let go
        pair.until(lambda pending=pending: all(leaving.done for _, leaving in pending))  # type: ignore[misc]
        pair.release()


def test_control_never_queues_behind_bulk(world: World) -> None:
    pair = ConnectedEnds(world, slot_bytes=4 << 20).joined()
    for i in range(8):
        pair.send(bytes([i]))
    pair.listener.send_control(_key(pair.decode), b"from the listener")
    pair.dialer.send_control(_key(pair.prefill), b"from the dialer")
    pair.until(lambda: pair.to_dialer == [b"from the listener"])
    pair.until(lambda: pair.to_listener == [b"from the dialer"])
    size = HEADER_BYTES + pair.ring.payload_bytes
    assert all(pair.take() == bytes([i]) * size for i in range(8))


def test_control_messages_keep_their_order(pair: ConnectedEnds) -> None:
    expected = [b"%d" % i for i in range(600)]
    for message in expected:
        pair.listener.send_control(_key(pair.decode), message)
        pair.dialer.send_control(_key(pair.prefill), message)
    pair.until(lambda: pair.to_dialer == expected and pair.to_listener == expected)


def test_a_slot_that_has_left_may_be_overwritten_at_once(world: World) -> None:
    pair = ConnectedEnds(world, slot_bytes=1 << 20).joined()
    pending = [pair.send(bytes([i])) for i in range(8)]
    for i in range(8):
        for slot, leaving in pending:
            if leaving.done:
                paint(slot, b"\xff")
        assert set(pair.take()) == {i}
    pair.dialer.receive_bulk(pair.world.clock())
    pair.until(lambda: all(leaving.done for _, leaving in pending))


@pytest.mark.parametrize("dies", ["listener", "dialer"])
def test_a_peer_that_was_killed_is_noticed_within_the_silence(world: World, dies: str) -> None:
    pair = ConnectedEnds(world, timing=QUICK).joined()
    pending = [pair.send(b"x") for _ in range(4)]
    start = world.clock()
    if dies == "listener":
        pair.prefill.kill()
        pair.until(lambda: len(pair.at_dialer) == 2, listener=False)
        assert not pair.dialer.is_live(_key(pair.prefill))
    else:
        pair.decode.kill()
        pair.until(lambda: len(pair.at_listener) == 2, dialer=False)
        assert not pair.listener.is_live(_key(pair.decode))
        with pytest.raises(PeerGoneError):
            pair.send(b"x")
        pair.until(lambda: all(leaving.done for _, leaving in pending), dialer=False)
    assert world.clock() - start < 3


def test_a_peer_that_hangs_is_lost_and_notices_when_it_wakes(world: World) -> None:
    pair = ConnectedEnds(world, timing=QUICK).joined()
    pair.until(lambda: len(pair.at_listener) == 2, dialer=False)
    assert isinstance(pair.at_listener[1], Lost)
    pair.until(lambda: len(pair.at_dialer) == 2)
    assert isinstance(pair.at_dialer[1], Lost)


def test_pings_alone_keep_a_connection(world: World) -> None:
    pair = ConnectedEnds(world, timing=QUICK).joined()
    end = world.clock() + 3 * QUICK.silence_seconds
    pair.until(lambda: world.clock() > end)
    assert len(pair.at_listener) == len(pair.at_dialer) == 1


@pytest.mark.parametrize("lane", ["bulk", "control", "answer"])
def test_a_message_beyond_the_limit_ends_the_connection_unread(world: World, lane: str) -> None:
    pair = ConnectedEnds(world, timing=QUICK).joined()
    if lane == "bulk":
        huge = memoryview(bytes(HEADER_BYTES + pair.prefill.config.slot_bytes + OVERHEAD_BYTES + 1))
        pair.listener.send_bulk(_key(pair.decode), huge)
    elif lane == "control":
        pair.listener.send_control(_key(pair.decode), bytes(TOO_LONG))
    else:
        pair.dialer.send_control(_key(pair.prefill), bytes(TOO_LONG))

    def turn() -> None:
        assert pair.dialer.receive_bulk(world.clock()) is None
        pair.turn()

    # A broken bulk socket shows when it is used next, or when the other end has gone silent.
    if lane == "bulk" and not world.memory:

        def sent_in_vain() -> bool:
            pair.release()
            pair.send(b"x")
            return False

        with pytest.raises(PeerGoneError):
            world.until(sent_in_vain, turn)
    world.until(lambda: len(pair.at_dialer) == 2 and len(pair.at_listener) == 2, turn)
    assert not pair.to_dialer and not pair.to_listener


def test_a_new_connection_of_a_peer_replaces_its_old_one(pair: ConnectedEnds) -> None:
    before = len(pair.at_listener)
    other = pair.world.rank("d", epoch=pair.decode.config.epoch, listen_host=None)
    other.loop._dialer.connect(_key(pair.prefill), pair.prefill.plane.endpoints, pair.world.clock())

    def turn() -> None:
        now = pair.world.clock()
        other.loop._dialer.receive_control(now)
        other.loop._dialer.notices(now)
        pair.turn()

    pair.world.until(lambda: len(pair.at_listener) == before + 2, turn)
    assert [type(notice) for notice in pair.at_listener[before:]] == [Lost, Joined]
