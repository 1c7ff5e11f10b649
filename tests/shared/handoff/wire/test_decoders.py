"""Every parser of bytes from strangers: the result is a value that round-trips or the parser's own
error, and memory is bounded by the number of bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import asdict, replace

import msgpack
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.engine.messages import CODEC, RankMessage
from tandem.shared.errors import PeerRefusedError
from tandem.shared.handoff.carriers.base import RankResources
from tandem.shared.handoff.carriers.cuda_ipc import carrier as cuda_ipc
from tandem.shared.handoff.carriers.cuda_ipc.device_ring import DevicePlace
from tandem.shared.handoff.carriers.device import DeviceError
from tandem.shared.handoff.carriers.doorbells import (
    DoorbellReader,
    DoorbellWriter,
    doorbell,
    payload_doorbell,
    read_doorbell,
    read_payload_doorbell,
)
from tandem.shared.handoff.carriers.memfd import MemfdError
from tandem.shared.handoff.carriers.nixl import carrier as nixl
from tandem.shared.handoff.carriers.nixl.agent import NixlError, NixlPlace
from tandem.shared.handoff.carriers.ranks import RankCarriers
from tandem.shared.handoff.carriers.shared_memory import carrier as shared_memory
from tandem.shared.handoff.carriers.shared_memory.carrier import SharedMemoryCarrier
from tandem.shared.handoff.carriers.shared_memory.ring import MappedRing, RingPlace, SharedRing
from tandem.shared.handoff.carriers.staging import PrivateMemory, StagingRing
from tandem.shared.handoff.carriers.tcp.carrier import TcpCarrier
from tandem.shared.handoff.carriers.zeromq.sockets import about_connection
from tandem.shared.handoff.wire import frame, greeting
from tandem.shared.handoff.wire.codec import CodecError
from tandem.shared.handoff.wire.frame import FrameError, Header, Kind
from tandem.shared.handoff.wire.greeting import Greeting, PeerKey
from tandem.tests.shared.handoff.support.plane_pair import PlaneRank
from tandem.tests.support.fuzz import EXTREMES, cheap, strange

LIMIT = 4096
U64, U32, U16 = (st.integers(0, 2**bits - 1) for bits in (64, 32, 16))
ME = Greeting(
    max_payload=1 << 20,
    node_id="p",
    epoch=1,
    rank=0,
    tp_size=1,
    dtype="bfloat16",
    layers=["K 64, V 64"] * 4,
)


# ---- frames --------------------------------------------------------------------------------------

PAYLOADS = {
    Kind.DATA: st.binary(min_size=1, max_size=100),
    Kind.ACK: U64.map(frame.ack_payload),
    Kind.NACK: st.text(max_size=50).map(frame.reason_payload),
    Kind.FIN: st.builds(frame.Fin, U64, U64, U64).map(frame.fin_payload),
    Kind.ABORT: st.text(max_size=50).map(frame.reason_payload),
    Kind.PING: st.just(b""),
    Kind.PONG: st.just(b""),
    Kind.CHOICE: st.text(min_size=1, max_size=50).map(frame.reason_payload),
    Kind.RELEASE: st.just(b""),
}
READERS = {
    Kind.ACK: lambda payload: frame.ack_payload(frame.read_ack(payload)),
    Kind.FIN: lambda payload: frame.fin_payload(frame.read_fin(payload)),
}


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(Kind))
    names = "transfer_id", "attempt", "sequence", "sender_epoch", "receiver_epoch"
    values = dict(zip(names, draw(st.tuples(U64, U32, U32, U64, U64)), strict=True))
    if kind is Kind.DATA:
        values |= {"end_layer": draw(U16), "end_token": draw(U32), "end_head": draw(U16)}
    return frame.encode(Header(kind=kind, **values), draw(PAYLOADS[kind]))


def resealed(message: bytes) -> bytes:
    """The message with a valid checksum."""
    if len(message) < frame.HEADER_BYTES:
        return message
    data = bytearray(message)
    at = frame.HEADER_BYTES - 8
    data[at : at + 8] = struct.pack("<Q", frame.checksum_of(memoryview(data)))
    return bytes(data)


@given(strange(frames()), st.booleans())
def test_a_frame_that_contradicts_its_header_is_refused(message: bytes, sealed: bool) -> None:
    message = resealed(message) if sealed else message
    try:
        header, payload = frame.decode(message, LIMIT)
    except FrameError:
        return
    assert frame.encode(header, bytes(payload)) == message
    if header.kind in READERS:
        assert READERS[header.kind](payload) == payload
    assert frame.read_reason(payload).isprintable()


@given(strange(frames()), U64)
def test_messages_about_a_connection_are_of_an_expected_kind_or_ignored(
    message: bytes, epoch: int
) -> None:
    peer = PeerKey(node_id="d", epoch=epoch, rank=0)
    result = about_connection(resealed(message), peer, 1, Kind.PING, Kind.CHOICE)
    assert result is None or result[0] in (Kind.PING, Kind.CHOICE)


# ---- greetings -----------------------------------------------------------------------------------

TEXTS = st.text(max_size=30).filter(str.isprintable)
GREETINGS = st.builds(
    Greeting,
    node_id=TEXTS,
    epoch=U64,
    rank=U32,
    tp_size=U32,
    dtype=st.sampled_from(["bfloat16", "float32"]) | TEXTS,
    layers=st.lists(st.sampled_from(ME.layers) | TEXTS, max_size=9),
    host=TEXTS,
    offers=st.dictionaries(
        st.sampled_from(["tcp", "cuda_ipc", "shared_memory"]) | TEXTS.filter(bool),
        st.binary(max_size=80),
        max_size=greeting.MAX_OFFERS,
    ),
    kv_scales=st.lists(st.floats(0.5, 448, width=32), max_size=6).map(greeting.packed_scales),
    max_payload=U32,
)


@given(strange(GREETINGS.map(greeting.encode)))
def test_a_greeting_is_understood_or_refused(message: bytes) -> None:
    try:
        theirs = greeting.decode(message)
    except FrameError:
        return
    assert greeting.decode(greeting.encode(theirs)) == theirs


NOTHING = RankResources(
    me=ME.key,
    sends=False,
    memory=PrivateMemory(1),
    ring=StagingRing(slots=2),
    max_frame_bytes=1,
    device=None,
    device_slots=0,
    device_slot_bytes=0,
)
CARRIERS_OF_ME = RankCarriers(
    [SharedMemoryCarrier(NOTHING), TcpCarrier(NOTHING)], NOTHING.ring, contextlib.ExitStack()
)


@given(GREETINGS)
def test_any_greeting_can_be_compared(theirs: Greeting) -> None:
    try:
        greeting.check(ME, theirs)
        assert CARRIERS_OF_ME.possible(ME, theirs)
    except PeerRefusedError as refusal:
        reply = replace(ME, refused=greeting.refusal_text(refusal))
        assert greeting.decode(greeting.encode(reply)) == reply


VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from(EXTREMES) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(asdict(ME))), VALUES)
def test_a_greeting_with_any_value_in_any_field(name: str, value: object) -> None:
    message = msgpack.packb(asdict(ME) | {name: value})
    try:
        theirs = greeting.decode(greeting.MAGIC + message)
    except FrameError:
        return
    assert getattr(theirs, name) == value and type(getattr(theirs, name)) is type(value)


# ---- offers --------------------------------------------------------------------------------------

RINGS = st.builds(RingPlace, U32, U32, U64, U64)
DEVICES = st.builds(DevicePlace, TEXTS, st.binary(max_size=80), U64)


@given(strange(st.builds(shared_memory.encode_offer, RINGS, U32)))
def test_an_offer_of_shared_memory_is_understood_or_refused(offer: bytes) -> None:
    with contextlib.suppress(MemfdError):
        assert shared_memory.encode_offer(*shared_memory.read_offer(offer)) == offer


@given(strange(st.builds(cuda_ipc.encode_offer, DEVICES, U32, U32)))
def test_an_offer_of_a_device_is_understood_or_refused(offer: bytes) -> None:
    with contextlib.suppress(DeviceError):
        place, *_ = cuda_ipc.read_offer(offer)
        assert place.device.isprintable() and 0 <= place.bytes < 2**64


@given(strange(st.builds(NixlPlace, st.binary(max_size=80), U64, U64).map(nixl.encode_offer)))
def test_an_offer_of_nixl_is_understood_or_refused(offer: bytes) -> None:
    with contextlib.suppress(NixlError):
        assert nixl.encode_offer(nixl.read_offer(offer)) == offer


# ---- shared memory -------------------------------------------------------------------------------


@given(strange(st.builds(payload_doorbell, U64, U32, st.binary(max_size=80).map(memoryview))))
def test_a_payload_doorbell_has_a_place_and_a_header_or_is_invalid(message: bytes) -> None:
    doorbell = read_payload_doorbell(message)
    assert doorbell is None or payload_doorbell(*doorbell[:2], memoryview(doorbell[2])) == message


@given(strange(st.builds(doorbell, U64, U32)))
def test_a_doorbell_names_a_place_or_is_none(message: bytes) -> None:
    place = read_doorbell(message)
    assert place is None or doorbell(*place) == message


@given(st.lists(strange(st.binary(max_size=40).map(lambda r: struct.pack("<H", len(r)) + r))))
def test_any_bytes_in_a_doorbell_are_records_or_nothing_yet(parts: list[bytes]) -> None:
    ours = DoorbellWriter(1)
    reader = DoorbellReader(os.getpid(), ours.descriptor, 1)
    for part in parts:
        os.write(ours._bell, part[:1000])
    records = list(iter(reader.next, None))
    stream = b"".join(part[:1000] for part in parts)
    assert b"".join(struct.pack("<H", len(r)) + r for r in records) == stream[: _length(records)]
    reader.close()
    ours.close()


def _length(records: list[bytes]) -> int:
    return sum(2 + len(record) for record in records)


@given(st.builds(RingPlace, U32, U32, U64 | st.integers(0, 10**6), U64))
def test_a_place_of_no_ring_of_ours_is_refused(place: RingPlace) -> None:
    with pytest.raises(MemfdError):
        MappedRing(place)


@given(U64 | st.integers(0, 9000), U32 | st.integers(0, 9000))
def test_a_slice_lies_within_the_ring_or_is_refused(offset: int, length: int) -> None:
    ring = SharedRing(8192)
    try:
        assert len(MappedRing(ring.place).slice(offset, length)) == length
    except MemfdError:
        assert offset + length > 8192
    finally:
        ring.close()


# ---- messages between a head and its ranks -------------------------------------------------------


def _packed(message: RankMessage) -> bytes:
    try:
        return CODEC.encode(message)
    except (OverflowError, UnicodeEncodeError):
        return b"\x91\x02"  # what has no place on the wire


MESSAGES = st.one_of([st.from_type(kind) for kind in CODEC.kinds]).map(_packed)


@given(strange(MESSAGES))
def test_a_message_is_understood_or_refused(data: bytes) -> None:
    try:
        message = CODEC.decode(data)
    except CodecError:
        return
    again = CODEC.encode(message)
    assert CODEC.encode(CODEC.decode(again)) == again


# ---- what lengths may cost -----------------------------------------------------------------------

HUGE = (
    *(bytes([kind]) + b"\xff\xff\xff\xff" for kind in b"\xc6\xc9\xdb\xdd\xdf"),  # msgpack
    b"\x91" * 2000,
    b"\x81\xa1x" * 600,
    b"\xdd\x7f\xff\xff\xff" * 400,
)


@pytest.mark.parametrize("body", HUGE)
def test_lengths_that_are_announced_cost_nothing(body: bytes) -> None:
    with cheap(0.5):
        for decode in (greeting.decode, CODEC.decode):
            for message in (body, greeting.MAGIC + body, b"\x93\x02" + body):
                with pytest.raises((FrameError, CodecError)):
                    decode(message)


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, LIMIT + 1])
def test_a_frame_of_four_gigabytes_costs_nothing(length: int) -> None:
    message = bytearray(frame.encode(Header(kind=Kind.PING, sender_epoch=1, receiver_epoch=2)))
    message[-12:-8] = length.to_bytes(4, "little")
    with cheap(0.1), pytest.raises(FrameError, match=f"{length} bytes; the limit is {LIMIT}"):
        frame.decode(resealed(bytes(message)), LIMIT)


def test_a_ring_of_exabytes_costs_nothing() -> None:
    with cheap(1):
        for size in (2**40, 2**63, 2**64 - 1):
            with pytest.raises(MemfdError):
                MappedRing(RingPlace(1, 1, size, 0))


def _zmtp(length: int) -> bytes:
    """A ZeroMQ peer's greeting, and the announcement of one message."""
    signature = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    head = signature + b"NULL".ljust(20, b"\0") + bytes(32)
    return head + b"\x04" + bytes([len(ready)]) + ready + b"\x02" + length.to_bytes(8, "big")


@pytest.mark.parametrize("length", [1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_a_message_that_is_announced_too_large_ends_the_connection(length: int) -> None:
    process = psutil.Process()
    with PlaneRank("p") as rank:
        for endpoint in (rank.plane.endpoints.bulk, rank.plane.endpoints.control):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            before = process.memory_info().rss
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(_zmtp(length))
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
            assert process.memory_info().rss - before < 100 << 20
