"""The carrier that reads over RDMA: refused where it is not possible, and no slot is used twice at
once.

Most of it runs without the library, against an agent that does what the test says.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tandem.shared.errors import StartupError
from tandem.shared.handoff.carriers.base import ReceiveChannel
from tandem.shared.handoff.carriers.doorbells import doorbell
from tandem.shared.handoff.carriers.nixl.agent import NixlAgent, NixlError, NixlPlace
from tandem.shared.handoff.carriers.nixl.buffers import RECEIVE_SLOTS, ReceiveBuffers
from tandem.shared.handoff.carriers.nixl.carrier import (
    MAX_PENDING,
    READ_SECONDS,
    NixlReader,
    agent_name,
    encode_offer,
)
from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane.messages import PeerJoined, PeerLost, ReceiveFailed
from tandem.shared.handoff.wire.frame import Kind
from tandem.shared.handoff.wire.greeting import PeerKey
from tandem.tests.shared.handoff.support import other_process
from tandem.tests.shared.handoff.support.fake_peers import FakeReceiver, FakeSender
from tandem.tests.shared.handoff.support.other_process import go, other, peer, read_json_line
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCKS,
    END,
    PlaneRank,
    expect,
    hand_over,
    until,
)

SLOT = 512
RING = NixlPlace(b"description", 1 << 20, 64 * SLOT)
P, Q = (PeerKey(node_id=name, epoch=1, rank=0) for name in "pq")


# ---- without the library -----------------------------------------------------------------------


def test_without_the_library_the_data_plane_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(StartupError, match=r"pip install '\.\[nixl\]'"):
        PlaneRank("p", carrier="nixl").plane.start()


def test_returning_a_slot_that_was_never_granted_loses_the_peer() -> None:
    with PlaneRank("p", seed=1) as prefill, FakeReceiver(PlaneRank("d"), prefill) as receiver:
        receiver.send(Kind.RELEASE)
        assert "it gave back 1 frames of 0" in prefill.log.wait(PeerLost).reason


@dataclass
class FakeReading:
    """A read that the test completes."""

    state: str = "under way"
    released: bool = False

    def finished(self) -> bool:
        if self.state == "failed":
            raise NixlError("a read failed: made to")
        return self.state == "landed"

    def over(self) -> bool:
        return self.state != "under way"

    def release(self) -> None:
        self.released = True


class FakeAgent:
    """Records its calls and moves nothing."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.reads: list[tuple[int, int, int]] = []
        self.readings: list[FakeReading] = []

    def register(self, memory: memoryview) -> Any:
        return SimpleNamespace(place=NixlPlace(b"", 0, len(memory)))

    def add(self, name: str, description: bytes) -> None:
        self.peers.append(name)

    def remove(self, name: str) -> None:
        self.peers.remove(name)

    def read(self, name: str, theirs: int, ours: int, length: int) -> FakeReading:
        self.reads.append((theirs, ours, length))
        self.readings.append(FakeReading())
        return self.readings[-1]


class DoorbellPair:
    """A socket for doorbells, and the reader at its other end."""

    def __init__(self, context: zmq.Context, buffers: ReceiveBuffers) -> None:
        self.bell, bulk = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.bell.bind("inproc://p")
        bulk.connect("inproc://p")
        self.given_back = 0
        self.reader = NixlReader(ReceiveChannel(1, P, bulk, self._give_back), buffers, RING)

    def _give_back(self) -> None:
        self.given_back += 1

    def lend(self, *slots: int) -> None:
        for slot in slots:
            self.bell.send(doorbell(slot * SLOT, SLOT))


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def buffers(agent: FakeAgent) -> Iterator[ReceiveBuffers]:
    buffers = ReceiveBuffers(agent, SLOT)  # type: ignore[arg-type]
    yield buffers
    buffers.close()
    assert agent.peers == []
    assert all(reading.released for reading in agent.readings)


@pytest.fixture
def pair(buffers: ReceiveBuffers) -> Iterator[DoorbellPair]:
    context = zmq.Context()
    pair = DoorbellPair(context, buffers)
    yield pair
    pair.reader.close()
    context.destroy(linger=0)


def test_frames_are_read_at_once_and_given_out_in_the_order_of_the_doorbells(
    agent: FakeAgent, pair: DoorbellPair
) -> None:
    pair.lend(3, 1, 2)
    pair.bell.send(b"a small frame")
    assert pair.reader.read(0) is None
    assert [theirs for theirs, _, _ in agent.reads] == [RING.address + n * SLOT for n in (3, 1, 2)]
    agent.readings[1].state = agent.readings[2].state = "landed"
    assert pair.reader.read(0) is None and pair.reader.needs_polling
    agent.readings[0].state = "landed"
    frames = []
    while (frame := pair.reader.read(0)) is not None:
        frames.append(bytes(frame))
        pair.reader.release()
    assert [len(frame) for frame in frames] == [SLOT, SLOT, SLOT, 13]
    assert frames[-1] == b"a small frame"
    assert pair.given_back == 3 and not pair.reader.needs_polling


def test_a_slot_is_not_used_again_before_its_read_is_over(
    agent: FakeAgent, buffers: ReceiveBuffers, pair: DoorbellPair
) -> None:
    pair.lend(*range(MAX_PENDING))
    pair.reader.read(0)
    slots = {ours for _, ours, _ in agent.reads}
    assert len(slots) == RECEIVE_SLOTS // 2  # no peer holds more than are free
    agent.readings[0].state = "landed"
    pair.reader.close()  # the peer is lost, with reads under way
    p = agent_name(P)
    assert agent.peers == [p]
    with pytest.raises(NixlError, match=r"reads of the last connection to p/0/.* are not over"):
        buffers.add(p, RING)
    buffers.add("q", RING)
    for holding in range(4):  # the slots of p that was read, and those that were free
        read = buffers.read("q", 0, SLOT, holding)
        assert read is not None and agent.reads[-1][1] not in slots - {agent.reads[0][1]}
        read.handle.state = "landed"  # type: ignore[attr-defined]
        buffers.free(read)
    for reading in agent.readings:
        reading.state = "failed" if reading.state == "under way" else reading.state
    buffers.reap()
    assert agent.peers == ["q"]
    buffers.add(p, RING)  # what comes back is greeted anew
    buffers.remove("q", ())
    assert agent.peers == [p]


def test_a_busy_reader_leaves_doorbells_on_its_socket(pair: DoorbellPair) -> None:
    pair.lend(*range(MAX_PENDING + 3))
    assert pair.reader.descriptors()
    pair.reader.read(0)
    assert pair.reader.descriptors() == []  # a poller would find it readable for ever


@pytest.mark.parametrize(
    ("offset", "length", "problem"),
    [
        (RING.bytes - 4, 5, "bytes 32764 to 32769 of a ring of 32768"),
        (2**64 - 1, 1, "of a ring of"),
        (0, 0, "a frame of 0 bytes"),
        (0, SLOT + 1, "a frame of 513 bytes; the limit is 512"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    offset: int, length: int, problem: str, pair: DoorbellPair
) -> None:
    pair.bell.send(doorbell(offset, length))
    with pytest.raises(NixlError, match=problem):
        pair.reader.read(0)


def test_a_read_that_fails_or_takes_for_ever_ends_the_connection(
    agent: FakeAgent, pair: DoorbellPair
) -> None:
    pair.lend(0)
    assert pair.reader.read(100.0) is None
    assert pair.reader.read(100.0 + READ_SECONDS) is None
    with pytest.raises(NixlError, match="took over 5 s"):
        pair.reader.read(100.1 + READ_SECONDS)
    agent.readings[0].state = "failed"
    with pytest.raises(NixlError, match="made to"):
        pair.reader.read(100.0)


# ---- with the library --------------------------------------------------------------------------


@pytest.fixture
def nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("the library is an extra: pip install '.[nixl]'")


@pytest.mark.usefixtures("nixl")
def test_it_is_used_when_both_sides_ask_for_it() -> None:
    with PlaneRank("p", seed=1, carrier="nixl") as prefill:
        with PlaneRank("d", listen_host=None, carrier="nixl") as decode:
            hand_over(prefill, decode)
            for rank in (prefill, decode):
                assert rank.log.wait(PeerJoined).carrier == "nixl"
                until(lambda rank=rank: rank.plane.stats().peers == {"nixl": 1})  # type: ignore[misc]
        with PlaneRank("e", listen_host=None, carrier="auto") as other:
            other.plane.submit(expect(prefill, 2, BLOCKS, first_token=0, end_token=END))
            failure = other.log.wait(ReceiveFailed, 2)
            assert "carrier: here nixl, at e shared_memory,tcp" in failure.reason
            assert not failure.retriable


@pytest.fixture
def decode(nixl: None) -> Iterator[PlaneRank]:
    with PlaneRank("d", listen_host=None, carrier="nixl") as rank:
        yield rank


@pytest.fixture
def registered() -> Iterator[tuple[FakeSender, NixlAgent, NixlPlace]]:
    """A sender that greets with real memory."""
    with FakeSender(PlaneRank("p", seed=1, carrier="nixl")) as sender:
        agent = NixlAgent(agent_name(sender.me.key))
        yield sender, agent, agent.register(memoryview(bytearray(64 * 2048))).place
        agent.close()


def _greet(decode: PlaneRank, sender: FakeSender, place: NixlPlace) -> None:
    decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
    sender.accept(offers={"nixl": encode_offer(place)})


@pytest.mark.parametrize("description", [b"", b"garbage", b"nixlSerDes|" + bytes(300)])
def test_a_description_that_means_nothing_loses_the_peer(
    decode: PlaneRank, description: bytes
) -> None:
    with FakeSender(PlaneRank("p", carrier="nixl")) as sender:
        _greet(decode, sender, NixlPlace(description, 0, 4096))
        failure = decode.log.wait(ReceiveFailed, 1)
        assert "carrier: nixl only, and NIXL cannot use the description of p/0/" in failure.reason
        assert failure.retriable


def test_the_description_of_another_agent_loses_the_peer(
    decode: PlaneRank, registered: Any
) -> None:
    _, _, place = registered
    with FakeSender(PlaneRank("q", carrier="nixl")) as sender:
        _greet(decode, sender, place)
        assert "is for 'p/0/" in decode.log.wait(ReceiveFailed, 1).reason


def test_an_address_that_is_not_registered_loses_the_peer(
    decode: PlaneRank, registered: Any
) -> None:
    sender, _, place = registered
    _greet(decode, sender, replace(place, address=place.address + (1 << 30)))
    sender.send(doorbell(0, 1024))
    failure = decode.log.wait(ReceiveFailed, 1)
    assert "NIXL cannot read 1024 bytes of p/0/" in failure.reason and failure.retriable


@pytest.mark.usefixtures("nixl")
def test_a_sender_that_falls_silent_during_a_read_fails_the_attempt(registered: Any) -> None:
    sender, _, place = registered
    timing = Timing(ping_seconds=0.1, silence_seconds=0.5)
    with PlaneRank("d", listen_host=None, carrier="nixl", timing=timing) as decode:
        _greet(decode, sender, place)
        decode.log.wait(PeerJoined)
        sender.send(doorbell(0, 1024), doorbell(2048, 1024))
        failure = decode.log.wait(ReceiveFailed, 1)
        assert "nothing heard" in failure.reason and failure.retriable


def test_a_killed_sender_fails_the_attempt_within_three_seconds(decode: PlaneRank) -> None:
    with other("nixl", "send", 77, decode.config.epoch) as process:
        sender = peer("p", 77, read_json_line(process))
        decode.expect(sender, 77, other_process.BLOCKS, first_token=0, end_token=other_process.END)
        go(process)
        until(lambda: decode.plane.stats().frames_received > 0)
    assert decode.log.wait(ReceiveFailed, 77, seconds=3).retriable
    assert decode.log.wait(PeerLost, seconds=3).node_id == "p"


def _held() -> tuple[int, int, int]:
    """Anonymous mappings as large as a ring, open descriptors, threads."""
    gc.collect()
    process = Path("/proc/self")
    maps = (process / "maps").read_text().count("/dev/zero (deleted)")
    return maps, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


@pytest.mark.usefixtures("nixl")
def test_connections_that_come_and_go_leave_nothing_behind() -> None:
    def come_and_go() -> tuple[int, int, int]:
        with PlaneRank("p", seed=1, carrier="nixl") as prefill:
            for number in range(2):
                with PlaneRank("d", listen_host=None, carrier="nixl") as decode:
                    hand_over(prefill, decode, number)
        return _held()

    first = come_and_go()  # the library keeps what it has once found out about devices
    come_and_go()
    until(lambda: all(now <= before for now, before in zip(_held(), first, strict=True)))
