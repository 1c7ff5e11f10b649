"""Frames that a decode rank should not receive: it neither believes them nor fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    Cancelled,
    Expecting,
    Received,
    ReceiveFailed,
)
from tandem.shared.handoff.wire import frame
from tandem.shared.handoff.wire.frame import Kind
from tandem.tests.shared.handoff.support.fake_peers import FakeSender
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    HEADS,
    LAYERS,
    PlaneRank,
    expect,
    rows,
    until,
)

pytestmark = pytest.mark.usefixtures("each_carrier")

BLOCKS = (3, 1)
END = 2 * BLOCK


@pytest.fixture
def decode() -> Iterator[PlaneRank]:
    with PlaneRank("d", seed=2, listen_host=None) as rank:
        yield rank


@pytest.fixture
def sender(decode: PlaneRank) -> Iterator[FakeSender]:
    with FakeSender(PlaneRank("p")) as fake:
        fake.expected_by(decode, 7, BLOCKS, first_token=0, end_token=END)
        yield fake
        # Whatever was sent, the plane still serves: a fresh transfer goes through.
        decode.plane.submit(expect(fake, 99, BLOCKS, first_token=0, end_token=END))
        decode.log.wait(Expecting, 99)
        frames = [fake.data(99, layer, layer, 0, END) for layer in range(LAYERS)]
        fake.send(*frames, fake.fin(99, frames))
        assert decode.log.wait(Received, 99).bytes == sum(map(len, frames)) - LAYERS * (
            frame.HEADER_BYTES
        )


def _contents(decode: PlaneRank) -> list[bytes]:
    return [bytes(layer) for layer in decode.cache.layers]


def _fails(decode: PlaneRank, sender: FakeSender, match: str) -> None:
    """The attempt fails with a reason, the sender is informed, and the blocks are unchanged."""
    event = decode.log.wait(ReceiveFailed, 7)
    assert match in event.reason
    assert event.retriable
    _, payload = sender.next(Kind.NACK)
    assert match in frame.read_reason(payload)
    after = _contents(decode)
    sender.send(sender.data(7, 0, 0, 0, END), sender.data(7, 1, 1, 0, END))
    until(lambda: decode.plane.stats().frames_stale == 2)
    assert _contents(decode) == after


def test_a_valid_transfer_is_confirmed_after_its_fin(decode: PlaneRank, sender: FakeSender) -> None:
    frames = [sender.data(7, layer, layer, 0, END) for layer in range(LAYERS)]
    sender.send(*frames)
    sender.send(sender.fin(7, frames))
    decode.log.wait(Received, 7)
    header, _ = sender.next(Kind.ACK)
    assert header.sequence == LAYERS + 1
    assert rows(decode.cache, BLOCKS, 0, 1)[0][:1] == b"\x01"


def test_a_corrupt_payload_fails_the_attempt_and_is_not_scattered(
    decode: PlaneRank, sender: FakeSender
) -> None:
    before = _contents(decode)
    message = bytearray(sender.data(7, 0, 0, 0, END))
    message[-1] ^= 1
    sender.send(bytes(message))
    _fails(decode, sender, "checksum")
    assert _contents(decode) == before
    assert decode.plane.stats().checksum_failures == 1


def test_a_duplicated_frame_fails_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    message = sender.data(7, 0, 0, 0, END)
    sender.send(message, message)
    _fails(decode, sender, "expected frame 1, got frame 0")


def test_a_reordered_frame_fails_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    sender.send(sender.data(7, 1, 1, 0, END))
    _fails(decode, sender, "expected frame 0, got frame 1")


def test_cells_that_came_before_fail_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    sender.send(sender.data(7, 0, 0, 0, 5), sender.data(7, 1, 0, 4, 9))
    _fails(decode, sender, "arrived before, in part")


@pytest.mark.parametrize(
    ("layer", "first", "end"), [(LAYERS, 0, 4), (0, 0, END + 1), (60_000, 0, 1), (0, END, END + 4)]
)
def test_cells_outside_of_the_reservation_fail_the_attempt(
    decode: PlaneRank, sender: FakeSender, layer: int, first: int, end: int
) -> None:
    message = sender.data(7, 0, 0, 0, end - first, end_layer=layer + 1, first_layer=layer)
    if layer == 0:
        message = sender.data(7, 0, layer, first, end)
    sender.send(message)
    _fails(decode, sender, "outside")


def test_heads_of_another_slice_fail_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    sender.send(sender.data(7, 0, 0, 0, END, first_head=HEADS, end_head=2 * HEADS))
    _fails(decode, sender, "heads")


def test_a_length_that_does_not_fit_the_cells_fails_the_attempt(
    decode: PlaneRank, sender: FakeSender
) -> None:
    sender.send(sender.data(7, 0, 0, 0, END, end_token=END - 1))
    _fails(decode, sender, "bytes for")


@pytest.mark.parametrize("change", [{"count": 9}, {"digest": 1}, {"total_bytes": 5}])
def test_a_fin_that_counts_otherwise_fails_the_attempt(
    decode: PlaneRank, sender: FakeSender, change: Any
) -> None:
    frames = [sender.data(7, layer, layer, 0, END) for layer in range(LAYERS)]
    sender.send(*frames, sender.fin(7, frames, **change))
    _fails(decode, sender, "the sender counts")


def test_a_fin_before_all_cells_fails_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    frames = [sender.data(7, 0, 0, 0, END)]
    sender.send(*frames, sender.fin(7, frames))
    _fails(decode, sender, f"fin after {END} of {LAYERS * END} cells")


def test_a_control_frame_on_the_bulk_connection_fails_the_attempt(
    decode: PlaneRank, sender: FakeSender
) -> None:
    sender.send(frame.encode(sender.header(Kind.ACK, 7), frame.ack_payload(1)))
    _fails(decode, sender, "ack frame on the bulk connection")


@pytest.mark.parametrize(
    "stale",
    [
        {"transfer_id": 8},
        {"attempt": 0},
        {"attempt": 2},
        {"sender_epoch": 5},
        {"receiver_epoch": 6},
    ],
)
def test_unexpected_frames_get_an_abort_and_do_no_harm(
    decode: PlaneRank, sender: FakeSender, stale: Any
) -> None:
    before = _contents(decode)
    header, payload = frame.decode(sender.data(7, 0, 0, 0, END), 1 << 20)
    message = frame.encode(header._replace(**stale), bytes(payload))
    sender.send(message, message)
    reply, _ = sender.next(Kind.ABORT)
    assert reply.transfer_id == stale.get("transfer_id", 7)
    assert reply.attempt == stale.get("attempt", 1)
    assert _contents(decode) == before
    until(lambda: decode.plane.stats().frames_stale == 2)
    assert decode.plane.stats().aborts_sent == 1
    frames = [sender.data(7, layer, layer, 0, END) for layer in range(LAYERS)]
    sender.send(*frames, sender.fin(7, frames))
    decode.log.wait(Received, 7)


def test_garbage_and_truncated_frames_are_dropped_and_the_transfer_goes_on(
    decode: PlaneRank, sender: FakeSender
) -> None:
    source = random.Random(3)
    good = [sender.data(7, layer, layer, 0, END) for layer in range(LAYERS)]
    bad = [b"", b"TDMF", source.randbytes(200), good[0][:-1], good[0][:40], b"TDMG" + bytes(90)]
    sender.send(*bad, *good, sender.fin(7, good))
    sender.send_control(source.randbytes(100))
    decode.log.wait(Received, 7)
    assert decode.plane.stats().frames_refused >= len(bad)


def test_frames_without_credit_fail_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    fields = {"first_token": 0, "end_token": END, "window_bytes": 8 * BLOCK}
    decode.plane.submit(expect(sender, 8, BLOCKS, **fields))
    decode.log.wait(Expecting, 8)
    sender.send(sender.data(8, 0, 0, 0, END))
    assert "without credit" in decode.log.wait(ReceiveFailed, 8).reason


def test_an_abort_by_the_sender_ends_the_attempt(decode: PlaneRank, sender: FakeSender) -> None:
    message = frame.encode(sender.header(Kind.ABORT, 7), b"preempted")
    sender.send_control(message)
    event = decode.log.wait(ReceiveFailed, 7)
    assert "preempted" in event.reason
    assert event.retriable


def test_after_the_cancel_is_acknowledged_nothing_is_scattered(
    decode: PlaneRank, sender: FakeSender
) -> None:
    sender.send(sender.data(7, 0, 0, 0, END))
    until(lambda: decode.plane.stats().frames_received == 1)
    decode.plane.submit(CancelExpect(transfer_id=7, attempt=1))
    assert decode.log.wait(Cancelled, 7).side == "receive"
    before = _contents(decode)
    sender.send(sender.data(7, 1, 1, 0, END), sender.data(7, 2, 2, 0, END))
    until(lambda: decode.plane.stats().frames_stale == 2)
    assert _contents(decode) == before
    assert not decode.log.of(ReceiveFailed)


def test_an_attempt_that_never_starts_ends_at_its_deadline(
    decode: PlaneRank, sender: FakeSender
) -> None:
    fields = {"first_token": 0, "end_token": END, "deadline_seconds": 0.1}
    decode.plane.submit(expect(sender, 8, BLOCKS, **fields))
    event = decode.log.wait(ReceiveFailed, 8)
    assert "not complete after 0.1 s" in event.reason


def test_a_message_beyond_the_limit_drops_the_connection(decode: PlaneRank) -> None:
    with FakeSender(PlaneRank("q")) as sender:
        sender.expected_by(decode, 8, BLOCKS, first_token=0, end_token=END)
        sender.send(bytes(10 << 20))
        assert decode.log.wait(ReceiveFailed, 8).retriable
        assert decode.plane.stats().bytes_received == 0


def test_a_cache_that_raises_ends_the_transfer_not_the_plane(
    decode: PlaneRank, sender: FakeSender
) -> None:
    decode.plane.submit(expect(sender, 8, (9999, 1), first_token=0, end_token=END))
    decode.log.wait(Expecting, 8)
    decode.cache.scatter = _broken  # type: ignore[assignment,method-assign]
    sender.send(sender.data(8, 0, 0, 0, 4))
    assert "no such block" in decode.log.wait(ReceiveFailed, 8).reason
    del decode.cache.scatter


def _broken(*_: object) -> None:
    raise IndexError("no such block")
