"""Frames: anything but exactly one valid frame is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.wire import frame
from tandem.shared.handoff.wire.frame import HEADER_BYTES, ChecksumError, FrameError, Header, Kind

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
LIMIT = 4096


def _range(limit: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, limit - 1), st.integers(1, limit)).map(
        lambda pair: (min(pair[0], pair[1] - 1), pair[1])
    )


@st.composite
def data_frames(draw: st.DrawFn) -> tuple[Header, bytes]:
    layers, tokens, heads = draw(_range(2**16)), draw(_range(2**32 - 1)), draw(_range(2**16 - 1))
    header = Header(
        kind=Kind.DATA,
        transfer_id=draw(U64),
        attempt=draw(U32),
        sequence=draw(U32),
        sender_epoch=draw(U64),
        receiver_epoch=draw(U64),
        first_layer=min(layers[0], 2**16 - 2),
        end_layer=min(layers[1], 2**16 - 1),
        first_token=tokens[0],
        end_token=tokens[1],
        first_head=heads[0],
        end_head=heads[1],
    )
    return header, draw(st.binary(min_size=1, max_size=300))


@given(data_frames())
def test_data_frame_survives_the_round_trip(case: tuple[Header, bytes]) -> None:
    header, payload = case
    result, view = frame.decode(frame.encode(header, payload), LIMIT)
    assert result == header
    assert bytes(view) == payload


@given(data_frames(), st.data())
def test_any_flipped_bit_is_found(case: tuple[Header, bytes], data: st.DataObject) -> None:
    message = bytearray(frame.encode(*case))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(FrameError):
        frame.decode(bytes(message), LIMIT)


@given(data_frames(), st.data())
def test_any_truncation_and_any_excess_is_found(
    case: tuple[Header, bytes], data: st.DataObject
) -> None:
    message = frame.encode(*case)
    with pytest.raises(FrameError):
        frame.decode(message[: data.draw(st.integers(0, len(message) - 1))], LIMIT)
    with pytest.raises(FrameError):
        frame.decode(message + data.draw(st.binary(min_size=1, max_size=9)), LIMIT)


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        frame.decode(garbage, LIMIT)
    with pytest.raises(FrameError):
        frame.decode(frame.MAGIC + garbage, LIMIT)


def test_a_huge_length_is_refused_before_it_is_used() -> None:
    message = bytearray(frame.encode(Header(kind=Kind.PING, sender_epoch=1, receiver_epoch=2)))
    message[HEADER_BYTES - 12 : HEADER_BYTES - 8] = b"\xff\xff\xff\xff"
    with pytest.raises(FrameError, match="4294967295 bytes; the limit is 4096"):
        frame.parse(bytes(message), LIMIT)


def test_a_payload_beyond_the_limit_is_refused() -> None:
    header = _data(0, 1)
    with pytest.raises(FrameError, match="101 bytes; the limit is 100"):
        frame.decode(frame.encode(header, bytes(101)), 100)


def _data(first: int, end: int) -> Header:
    return Header(
        kind=Kind.DATA,
        sender_epoch=1,
        receiver_epoch=2,
        end_layer=1,
        first_token=first,
        end_token=end,
        end_head=1,
    )


@pytest.mark.parametrize(("first", "end"), [(5, 5), (6, 5)])
def test_an_empty_or_inverted_range_is_refused(first: int, end: int) -> None:
    with pytest.raises(FrameError, match="empty tokens"):
        frame.decode(frame.encode(_data(first, end), b"x"), LIMIT)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.ACK, b""),
        (Kind.ACK, bytes(9)),
        (Kind.FIN, bytes(23)),
        (Kind.PING, b"x"),
        (Kind.PONG, b"x"),
        (Kind.NACK, bytes(frame.MAX_REASON_BYTES + 1)),
        (Kind.ABORT, bytes(frame.MAX_REASON_BYTES + 1)),
    ],
)
def test_a_control_frame_of_the_wrong_size_is_refused(kind: Kind, payload: bytes) -> None:
    message = frame.encode(Header(kind=kind, sender_epoch=1, receiver_epoch=2), payload)
    with pytest.raises(FrameError, match=kind.name.lower()):
        frame.decode(message, LIMIT)


def test_a_control_frame_with_ranges_is_refused() -> None:
    header = Header(kind=Kind.PING, sender_epoch=1, receiver_epoch=2, end_layer=1)
    with pytest.raises(FrameError, match="ping frame with ranges"):
        frame.decode(frame.encode(header), LIMIT)


@pytest.mark.parametrize(("at", "value", "match"), [(4, 9, "version 9"), (6, 1, "flags 0x1")])
def test_another_version_and_unknown_flags_are_named(at: int, value: int, match: str) -> None:
    message = bytearray(frame.encode(Header(kind=Kind.PING, sender_epoch=1, receiver_epoch=2)))
    message[at] = value
    with pytest.raises(FrameError, match=match):
        frame.decode(bytes(message), LIMIT)


def test_an_unknown_type_is_named() -> None:
    message = bytearray(frame.encode(Header(kind=Kind.PING, sender_epoch=1, receiver_epoch=2)))
    message[5] = 77
    with pytest.raises(FrameError, match="type 77"):
        frame.decode(bytes(message), LIMIT)


def test_a_corrupt_payload_is_a_checksum_error() -> None:
    message = bytearray(frame.encode(_data(0, 1), b"abc"))
    message[-1] ^= 1
    with pytest.raises(ChecksumError):
        frame.decode(bytes(message), LIMIT)


def test_the_digest_depends_on_the_order_of_frames() -> None:
    one, two = frame.Digest(), frame.Digest()
    one.add(1)
    one.add(2)
    two.add(2)
    two.add(1)
    assert one.value != two.value


def test_a_reason_from_the_wire_is_safe_to_log() -> None:
    assert frame.read_reason(memoryview(b"a\x1b[31m\xff")) == "a?[31m\ufffd"
