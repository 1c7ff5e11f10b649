"""The carrier of two ranks on one host: chosen when they greet, and no way into other memory."""

from __future__ import annotations

import gc
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.errors import StartupError
from tandem.shared.handoff.carriers.doorbells import DoorbellReader
from tandem.shared.handoff.carriers.memfd import MemfdError
from tandem.shared.handoff.carriers.shared_memory import carrier as shared_memory
from tandem.shared.handoff.carriers.shared_memory.ring import MappedRing, SharedRing
from tandem.shared.handoff.plane import loop as plane_loop
from tandem.shared.handoff.plane.messages import (
    Expecting,
    PeerJoined,
    PeerLost,
    Received,
    ReceiveFailed,
    SendFailed,
)
from tandem.shared.handoff.wire import frame
from tandem.shared.handoff.wire.frame import Kind
from tandem.tests.shared.handoff.support.by_hand import World
from tandem.tests.shared.handoff.support.fake_peers import FakeReceiver, FakeSender
from tandem.tests.shared.handoff.support.faults import reset
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    BLOCKS,
    END,
    PlaneRank,
    expect,
    hand_over,
    rows,
    until,
)

# ---- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "carrier"),
    [
        ("auto", "auto", "shared_memory"),
        ("shared_memory", "auto", "shared_memory"),
        ("auto", "shared_memory", "shared_memory"),
        ("tcp", "auto", "tcp"),
        ("auto", "tcp", "tcp"),
    ],
)
def test_two_ranks_on_one_host_agree_on_a_carrier(here: str, there: str, carrier: str) -> None:
    with (
        PlaneRank("p", seed=1, carrier=there) as prefill,
        PlaneRank("d", listen_host=None, carrier=here) as decode,
    ):
        hand_over(prefill, decode)
        for rank in (prefill, decode):
            assert rank.log.wait(PeerJoined).carrier == carrier
            assert rank.plane.stats().peers == {carrier: 1}


def test_two_hosts_use_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    with PlaneRank("p", seed=1) as prefill:
        monkeypatch.setattr(plane_loop, "host_identity", lambda: "elsewhere")
        with PlaneRank("d", listen_host=None) as decode:
            hand_over(prefill, decode)
            assert decode.log.wait(PeerJoined).carrier == "tcp"


@pytest.mark.parametrize("forced", ["prefill", "decode"])
def test_a_forced_carrier_that_is_not_possible_is_a_refusal_by_name(
    forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carriers = {"prefill": "auto", "decode": "auto"} | {forced: "shared_memory"}
    with PlaneRank("p", seed=1, carrier=carriers["prefill"]) as prefill:
        monkeypatch.setattr(plane_loop, "host_identity", lambda: "elsewhere")
        with PlaneRank("d", listen_host=None, carrier=carriers["decode"]) as decode:
            decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
            failure = decode.log.wait(ReceiveFailed, 1)
            assert "carrier: here" in failure.reason and "on two hosts" in failure.reason
            assert not failure.retriable


def test_a_ring_that_cannot_be_mapped_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: object) -> None:
        raise MemfdError("cannot map it")

    monkeypatch.setattr(shared_memory, "MappedRing", refuse)
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        hand_over(prefill, decode)
        event = decode.log.wait(PeerJoined)
        assert (event.carrier, event.note) == ("tcp", "cannot map it")
        assert prefill.log.wait(PeerJoined).carrier == "tcp"


def test_a_system_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "can_share", lambda: False)
    with pytest.raises(StartupError, match="--carrier shared_memory is not possible here"):
        PlaneRank("p", carrier="shared_memory").plane.start()
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        hand_over(prefill, decode)
        assert decode.log.wait(PeerJoined).carrier == "tcp"


# ---- what a peer may not do --------------------------------------------------------------------


def _receiver(prefill: PlaneRank) -> FakeReceiver:
    return FakeReceiver(PlaneRank("d"), prefill, offers={"shared_memory": b"", "tcp": b""})


def _bells(receiver: FakeReceiver) -> DoorbellReader:
    assert receiver.bells is not None
    return receiver.bells


def _ring(receiver: FakeReceiver) -> MappedRing:
    assert receiver.ring is not None
    return receiver.ring


def test_slots_come_back_only_when_the_receiver_has_read_them() -> None:
    with PlaneRank("p", seed=1) as prefill, _receiver(prefill) as receiver:
        receiver.share()
        prefill.open(receiver, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, END, chunk=END)
        until(lambda: prefill.plane.stats().held_slots == 4)  # half of the ring: others need some
        places = [receiver.heard() for _ in range(4)]
        assert len(set(places)) == 4 and _bells(receiver).next() is None
        for place in places:
            assert _ring(receiver).slice(*place)[:4].tobytes() == frame.MAGIC
        _bells(receiver).give_back()
        receiver.heard()  # the next one follows


def test_returning_more_slots_than_were_granted_loses_the_peer() -> None:
    with PlaneRank("p", seed=1) as prefill, _receiver(prefill) as receiver:
        receiver.share()
        prefill.open(receiver, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, 1, chunk=1)
        # A loss before it would concern earlier attempts only.
        until(lambda: prefill.plane.stats().active_sends == 1)
        for _ in range(100):
            _bells(receiver).give_back()
        assert "it gave back" in prefill.log.wait(SendFailed, 1).reason
        until(lambda: prefill.plane.stats().held_slots == 0)


@pytest.mark.parametrize("choice", [b"carrier pigeon", b"tcp,shared_memory"])
def test_a_choice_that_was_not_offered_loses_the_peer(choice: bytes) -> None:
    with PlaneRank("p", seed=1) as prefill, _receiver(prefill) as receiver:
        receiver.send(Kind.CHOICE, payload=choice)
        assert "it chose the carrier" in prefill.log.wait(PeerLost).reason


def test_a_choice_of_another_epoch_is_ignored() -> None:
    with PlaneRank("p", seed=1) as prefill, _receiver(prefill) as receiver:
        receiver.send(Kind.CHOICE, payload=b"tcp", receiver_epoch=3)
        until(lambda: prefill.plane.stats().frames_stale == 1)
        assert not prefill.log.of(PeerJoined)


def test_a_place_outside_of_the_ring_loses_the_peer() -> None:
    lender = PlaneRank("p", seed=1)
    ring = SharedRing(4096)
    with PlaneRank("d", listen_host=None) as decode, FakeSender(lender) as sender:
        decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
        sender.accept(ring)
        sender.lend(4000, 97)
        failure = decode.log.wait(ReceiveFailed, 1)
        assert "bytes 4000 to 4097 of a ring of 4096" in failure.reason and failure.retriable
    ring.close()


def test_a_frame_that_is_taken_back_while_it_is_read_is_not_believed() -> None:
    """The receiver stands still in the middle of a frame until the sender gives it up."""
    with World("shared_memory") as world:
        prefill = world.rank("p", seed=1)
        slow, other = (world.rank(name, listen_host=None) for name in ("slow", "other"))
        # The first fits into one frame, so its fin is on the way with it.
        short, long = ({"first_token": 0, "end_token": end} for end in (BLOCK, END))
        for number, (decode, fields) in enumerate(((slow, short), (other, long))):
            decode.plane.submit(expect(prefill, number, BLOCKS, **fields))
            world.until(lambda decode=decode: bool(decode.log.of(Expecting)))  # type: ignore[misc]
        scatter = slow.cache.scatter

        def turn() -> None:
            prefill.turn()
            other.turn()

        def stand_still(*of: object) -> None:
            """Just before the bytes are read, their slots go to another transfer."""
            del slow.cache.scatter
            listener: Any = prefill.loop._listener
            reset(listener, next(peer for peer in listener._by_peer if peer.node_id == "slow"))
            prefill.open(other, 1, BLOCKS, **long)
            prefill.compute(1, 0, END, chunk=END)
            world.until(lambda: bool(other.log.of(Received)), turn)
            scatter(*of)  # type: ignore[arg-type]

        slow.cache.scatter = stand_still  # type: ignore[method-assign, assignment]
        prefill.open(slow, 0, BLOCKS, **short)
        prefill.compute(0, 0, BLOCK, chunk=BLOCK)
        world.until(lambda: bool(slow.log.of(ReceiveFailed) or slow.log.of(Received)))
        assert not slow.log.of(Received)
        assert "changed while it was read" in slow.log.of(ReceiveFailed)[0].reason
        assert rows(other.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def _returned(sender: FakeSender, counts: list[int]) -> int:
    """The frames given back so far."""
    assert sender.bells is not None
    counts.append(sender.bells.count_returns())
    return sum(counts)


def test_garbage_in_the_ring_is_refused_like_garbage_on_the_wire() -> None:
    ring = SharedRing(4096)
    ring.memory[:4096] = os.urandom(4096)
    with PlaneRank("d", listen_host=None) as decode, FakeSender(PlaneRank("p", seed=1)) as sender:
        decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
        sender.accept(ring)
        for index in range(8):
            sender.lend(index * 512, 512)
        until(lambda: decode.plane.stats().frames_refused == 8)
        credits: list[int] = []
        until(lambda: _returned(sender, credits) == 8)
    ring.close()


def _held() -> tuple[int, int]:
    """Mappings of rings in this process, and its open descriptors."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:tandem-staging"), len(list(Path("/proc/self/fd").iterdir()))


def test_connections_that_come_and_go_leave_no_mapping_and_no_descriptor() -> None:
    before = _held()
    for _ in range(5):
        with PlaneRank("p", seed=1) as prefill:
            for number in range(3):
                with PlaneRank("d", listen_host=None) as decode:
                    hand_over(prefill, decode, number)
    mappings, descriptors = _held()
    # Others in this process may let go of theirs meanwhile.
    assert mappings == before[0] and descriptors <= before[1]


# ---- the ring ----------------------------------------------------------------------------------


def test_a_ring_is_seen_by_another_mapping_and_cannot_be_written_or_cut_there() -> None:
    ring = SharedRing(10_000)
    ring.memory[9_990:10_000] = b"0123456789"
    mapped = MappedRing(ring.place)
    assert mapped.slice(9_990, 10) == b"0123456789"
    assert mapped.slice(0, 1).readonly
    with pytest.raises(MemfdError, match="of a ring of 10000"):
        mapped.slice(9_991, 10)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.place.descriptor, mmap.PAGESIZE)
    ring.close()
    ring.memory[0] = 7  # the owner's map stands until it is let go
    assert mapped.slice(0, 1) == b"\x07"


def test_only_the_ring_that_was_meant_is_mapped() -> None:
    ring = SharedRing(4096)
    with pytest.raises(MemfdError, match="the ring of another process"):
        MappedRing(replace(ring.place, nonce=ring.place.nonce ^ 1))
    with pytest.raises(MemfdError, match="does not have"):
        MappedRing(replace(ring.place, bytes=8192))
    for size in (0, 2**63):
        with pytest.raises(MemfdError, match="a ring of"):
            MappedRing(replace(ring.place, bytes=size))
    with pytest.raises(MemfdError, match="is not a tandem-staging"):
        MappedRing(replace(ring.place, descriptor=0))
    with pytest.raises(MemfdError, match="cannot open"):
        MappedRing(replace(ring.place, pid=2**31 - 1))
    ring.close()
    with pytest.raises(MemfdError):
        MappedRing(ring.place)


def test_an_unsealed_memory_file_is_refused() -> None:
    descriptor = os.memfd_create("tandem-staging", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE + 4096)
        place = replace(SharedRing(4096).place, descriptor=descriptor)
        with pytest.raises(MemfdError, match="not sealed"):
            MappedRing(place)
    finally:
        os.close(descriptor)


def test_an_offer_carries_the_place_of_a_ring() -> None:
    ring = SharedRing(BLOCK)
    offer = shared_memory.encode_offer(ring.place, 77)
    assert shared_memory.read_offer(offer) == (ring.place, 77)
    for broken in (b"", offer[:-1], offer + b"x"):
        with pytest.raises(MemfdError, match="an offer of shared_memory with"):
            shared_memory.read_offer(broken)
    ring.close()
