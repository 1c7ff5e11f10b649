from __future__ import annotations

import pytest

from tandem.shared.handoff.carriers.staging import StagingRing, StagingSlot
from tandem.shared.handoff.wire.frame import HEADER_BYTES


def acquired(ring: StagingRing) -> StagingSlot:
    slot = ring.acquire()
    assert slot is not None
    return slot


def test_slots_do_not_overlap_and_have_room_for_header_and_payload() -> None:
    ring = StagingRing(slots=3, payload_bytes=100)
    slots = [acquired(ring) for _ in range(3)]
    for slot in slots:
        assert len(slot.buffer) == HEADER_BYTES + 100
        assert len(slot.payload) == 100
        slot.buffer[:] = bytes([slot.index + 1]) * len(slot.buffer)
    assert all(set(slot.buffer) == {slot.index + 1} for slot in slots)


def test_an_exhausted_ring_gives_none_until_a_slot_returns() -> None:
    ring = StagingRing(slots=2, payload_bytes=8)
    first, _ = acquired(ring), acquired(ring)
    assert ring.acquire() is None
    ring.release(first)
    assert ring.acquire() == first


def test_a_slot_cannot_be_released_twice() -> None:
    ring = StagingRing(slots=2, payload_bytes=8)
    slot = acquired(ring)
    ring.release(slot)
    with pytest.raises(ValueError, match="not in use"):
        ring.release(slot)


def test_a_leaked_slot_is_noticed() -> None:
    ring = StagingRing(slots=2, payload_bytes=8)
    ring.check_conserved(0)
    ring.acquire()
    ring.check_conserved(1)
    with pytest.raises(AssertionError, match="leaked"):
        ring.check_conserved(0)


def test_memory_can_be_brought_along_and_must_suffice() -> None:
    memory = bytearray(2 * StagingRing.stride(8))
    ring = StagingRing(slots=2, payload_bytes=8, memory=memoryview(memory))
    slot = acquired(ring)
    slot.payload[:] = b"12345678"
    at = slot.offset + HEADER_BYTES
    assert at % 64 == 0 and memory[at : at + 8] == b"12345678"
    with pytest.raises(ValueError, match="are too few for 2 slots"):
        StagingRing(slots=2, payload_bytes=8, memory=memoryview(bytearray(99)))


def test_the_slot_that_was_used_last_is_used_next() -> None:
    ring = StagingRing(slots=4, payload_bytes=8)
    first, second = acquired(ring), acquired(ring)
    ring.release(first)
    ring.release(second)
    assert ring.acquire() == second
