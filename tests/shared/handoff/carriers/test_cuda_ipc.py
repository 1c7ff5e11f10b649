"""The carrier between two GPUs of one host, over a fake driver."""

from __future__ import annotations

import ctypes
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from tandem.shared.errors import StartupError
from tandem.shared.handoff.carriers.cuda_ipc import carrier as cuda_ipc
from tandem.shared.handoff.carriers.cuda_ipc.device_ring import DevicePlace
from tandem.shared.handoff.carriers.device import DEVICE_WINDOW_BYTES, DeviceError
from tandem.shared.handoff.carriers.doorbells import DoorbellReader
from tandem.shared.handoff.carriers.staging import HOST_WINDOW_BYTES
from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane import loop as plane_loop
from tandem.shared.handoff.plane.endpoint import DataPlane
from tandem.shared.handoff.plane.messages import (
    WINDOW_OF_CARRIER,
    Expecting,
    PeerJoined,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from tandem.shared.handoff.plane.settings import DataPlaneConfig
from tandem.shared.handoff.wire import frame
from tandem.shared.handoff.wire.frame import HEADER_BYTES, ChecksumError, DeviceFrame
from tandem.tests.shared.handoff.support import other_process
from tandem.tests.shared.handoff.support.by_hand import HandRank, World
from tandem.tests.shared.handoff.support.fake_driver import (
    DEVICES,
    FakeDevice,
    FakeDriver,
    as_memory,
    device_named,
)
from tandem.tests.shared.handoff.support.fake_peers import FakeReceiver, FakeSender
from tandem.tests.shared.handoff.support.other_process import (
    contents,
    go,
    other,
    peer,
    read_json_line,
)
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCKS,
    CELL,
    END,
    LAYERS,
    PlaneRank,
    expect,
    hand_over,
    make_cache,
    rows,
    until,
)

OTHER_VERSION = "cuda_ipc of another version: its checksums or the sizes of its frames differ"
REMEDY = "use --carrier auto on both nodes"


def refusing(*calls: str) -> FakeDevice:
    return FakeDevice(FakeDriver(*calls))


# ---- the choice --------------------------------------------------------------------------------


def _driver(rank: PlaneRank | HandRank) -> Any:
    assert rank.device is not None
    return rank.device.driver


def _returned(sender: FakeSender, counts: list[int]) -> int:
    """The frames given back so far."""
    assert sender.bells is not None
    counts.append(sender.bells.count_returns())
    return sum(counts)


@pytest.mark.parametrize(
    ("here", "there", "carrier"),
    [
        ("auto", "auto", "cuda_ipc"),
        ("cuda_ipc", "auto", "cuda_ipc"),
        ("auto", "cuda_ipc", "cuda_ipc"),
        ("shared_memory", "auto", "shared_memory"),
        ("auto", "tcp", "tcp"),
    ],
)
def test_two_ranks_with_gpus_of_one_host_agree_on_a_carrier(
    here: str, there: str, carrier: str
) -> None:
    with (
        PlaneRank("p", seed=1, carrier=there, device=FakeDevice()) as prefill,
        PlaneRank("d", listen_host=None, carrier=here, device=FakeDevice()) as decode,
    ):
        hand_over(prefill, decode)
        for rank in (prefill, decode):
            event = rank.log.wait(PeerJoined)
            assert (event.carrier, event.note) == (carrier, "")
            assert rank.plane.stats().peers == {carrier: 1}
        assert bool(_driver(decode).calls["copy"]) == (carrier == "cuda_ipc")


@pytest.mark.parametrize("without", ["prefill", "decode"])
def test_a_rank_without_a_gpu_gets_kv_through_the_host(without: str) -> None:
    devices = {"prefill": FakeDevice(), "decode": FakeDevice(), without: None}
    with (
        PlaneRank("p", seed=1, device=devices["prefill"]) as prefill,
        PlaneRank("d", listen_host=None, device=devices["decode"]) as decode,
    ):
        hand_over(prefill, decode)
        assert decode.log.wait(PeerJoined).carrier == "shared_memory"


def test_on_another_host_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with PlaneRank("p", seed=1, carrier="cuda_ipc") as prefill:
        monkeypatch.setattr(plane_loop, "host_identity", lambda: "elsewhere")
        with PlaneRank("d", listen_host=None, device=FakeDevice()) as decode:
            decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
            failure = decode.log.wait(ReceiveFailed, 1)
            expected = f"cuda_ipc, at d cuda_ipc,shared_memory,tcp, on two hosts; {REMEDY}"
            assert expected in failure.reason and not failure.retriable


def test_without_a_gpu_it_cannot_be_requested() -> None:
    plane = DataPlane(
        DataPlaneConfig(node_id="p", epoch=1, carrier="cuda_ipc"), make_cache(), print
    )
    expected = "--carrier cuda_ipc is not possible here: the KV cache is not on a CUDA device; use "
    with pytest.raises(StartupError, match=expected):
        plane.start()


@pytest.mark.parametrize("call", ["allocate", "export"])
def test_a_gpu_whose_memory_cannot_be_exported_is_done_without(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StartupError, match=rf"--carrier cuda_ipc .*: {call}: no such luck"):
        PlaneRank("p", carrier="cuda_ipc", device=refusing(call)).plane.start()
    with (
        PlaneRank("p", seed=1, device=refusing(call)) as prefill,
        PlaneRank("d", listen_host=None, device=FakeDevice()) as decode,
    ):
        hand_over(prefill, decode)
        assert decode.log.wait(PeerJoined).carrier == "shared_memory"
    expected = f"KV is transferred without the carrier cuda_ipc: {call}: no such luck"
    assert [each.levelname for each in caplog.records if each.message == expected] == ["WARNING"]


def test_memory_that_cannot_be_opened_is_not_used_and_the_reason_is_logged() -> None:
    """GPUs of one host need not reach each other."""
    with PlaneRank("p", seed=1, device=FakeDevice()) as prefill:
        with PlaneRank("d", listen_host=None, device=refusing("open")) as decode:
            hand_over(prefill, decode)
            event = decode.log.wait(PeerJoined)
            assert event.carrier == "shared_memory"
            expected = "cannot open memory of GPU-fake from GPU-fake: open: no such luck"
            assert event.note == expected
        with PlaneRank(
            "e", listen_host=None, carrier="cuda_ipc", device=refusing("open")
        ) as forced:
            forced.plane.submit(expect(prefill, 2, BLOCKS, first_token=0, end_token=END))
            reason = forced.log.wait(ReceiveFailed, 2).reason
            assert f"carrier: cuda_ipc only, and {expected}; {REMEDY}" in reason


def test_releases_with_frames_of_different_sizes_do_not_use_it() -> None:
    with PlaneRank("p", seed=1, device=FakeDevice(), device_slot_bytes=2 * 2048) as prefill:
        with PlaneRank("d", listen_host=None, device=FakeDevice()) as decode:
            hand_over(prefill, decode)
            event = prefill.log.wait(PeerJoined)
            assert (event.carrier, event.note) == ("shared_memory", OTHER_VERSION)
        with PlaneRank("e", listen_host=None, carrier="cuda_ipc") as forced:
            forced.plane.submit(expect(prefill, 2, BLOCKS, first_token=0, end_token=END))
            expected = f"carrier: cuda_ipc only, and {OTHER_VERSION}; {REMEDY}"
            assert expected in forced.log.wait(ReceiveFailed, 2).reason


@pytest.mark.parametrize(
    ("hello", "carriers"),
    [
        (struct.pack("<BQQ", 1, 2048, DEVICE_WINDOW_BYTES), ["cuda_ipc", "tcp"]),
        (struct.pack("<BQQ", 2, 2048, DEVICE_WINDOW_BYTES), ["tcp"]),
        (struct.pack("<BQQ", 1, 2048, DEVICE_WINDOW_BYTES // 2), ["tcp"]),
        (b"\x01", ["tcp"]),
        (b"", ["tcp"]),
    ],
)
def test_two_versions_that_sum_or_send_differently_do_not_use_it(
    hello: bytes, carriers: list[str]
) -> None:
    with (
        PlaneRank("p", device=FakeDevice()) as prefill,
        FakeReceiver(PlaneRank("d"), prefill, offers={"cuda_ipc": hello, "tcp": b""}) as receiver,
    ):
        assert list(receiver.welcome.offers) == carriers


def test_an_offer_carries_the_place_of_a_ring_on_a_device() -> None:
    place = DevicePlace("GPU-1", bytes(range(64)), 1 << 33)
    offer = cuda_ipc.encode_offer(place, 4711, 9)
    assert cuda_ipc.read_offer(offer) == (place, 4711, 9)
    for broken in (b"", offer[:-1], offer + b"x", b"\x02" + offer[1:]):
        with pytest.raises(DeviceError, match=r"an offer of|checksums of version 2, not 1"):
            cuda_ipc.read_offer(broken)


def test_a_gpus_staging_ring_is_pinned_or_the_reason_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for device in (FakeDevice(), refusing("pin")):
        with (
            PlaneRank("p", seed=1, carrier="tcp", device=device) as prefill,
            PlaneRank("d", listen_host=None, carrier="tcp") as decode,
        ):
            hand_over(prefill, decode)
            assert device.driver.calls["pin"] == 1
    assert caplog.text.count("the staging ring is not pinned (pin: no such luck)") == 1


@pytest.mark.parametrize(
    ("carrier", "window"), [("cuda_ipc", DEVICE_WINDOW_BYTES), ("tcp", HOST_WINDOW_BYTES)]
)
def test_the_default_window_depends_on_the_carrier(carrier: str, window: int) -> None:
    with World(carrier) as world:
        prefill, decode = world.rank("p", seed=1), world.rank("d", listen_host=None)
        fields = {"first_token": 0, "end_token": END, "window_bytes": WINDOW_OF_CARRIER}
        decode.plane.submit(expect(prefill, 1, BLOCKS, **fields))
        world.until(lambda: bool(decode.log.of(Expecting)))
        prefill.open(decode, 1, BLOCKS, **fields)
        prefill.compute(1, 0, END - 1, chunk=END)
        world.until(lambda: prefill.plane.stats().frames_sent > 0)
        stats = prefill.plane.stats()
        assert stats.credit_free + stats.credit_in_flight == window
        prefill.compute(1, END - 1, END, chunk=1)
        world.until(lambda: bool(prefill.log.of(SendFinished)))
        assert decode.log.of(Received)[0].bytes == LAYERS * END * CELL


# ---- frames ------------------------------------------------------------------------------------


def _frame(device: FakeDevice, size: int = 1000) -> DeviceFrame:
    address = device.driver.allocate(size)
    payload = device.view(address, size)
    as_memory(payload)[:] = random.Random(size).randbytes(size)
    head = memoryview(bytearray(HEADER_BYTES))
    message = DeviceFrame(head, payload, device.sums)
    header = frame.Header(
        kind=frame.Kind.DATA, sender_epoch=1, receiver_epoch=2, end_layer=1, end_token=1, end_head=1
    )
    frame.seal(message, header)
    assert len(message) == HEADER_BYTES + size and frame.parse(message, size)[0] == header
    frame.verify(message)
    return message


def test_a_flipped_bit_of_header_or_payload_is_found() -> None:
    message = _frame(FakeDevice())
    payload = as_memory(message.payload)
    for at in (0, 1, 499, 999):
        payload[at] ^= 16
        with pytest.raises(ChecksumError):
            frame.verify(message)
        payload[at] ^= 16
    for at in range(6, HEADER_BYTES):
        message.head[at] ^= 1
        with pytest.raises(ChecksumError):
            frame.verify(message)
        message.head[at] ^= 1
    frame.verify(message)


def test_a_payload_of_another_length_than_the_header_says_is_refused() -> None:
    message = _frame(FakeDevice())
    with pytest.raises(frame.FrameError, match="header says 1000 payload bytes, but there are 999"):
        frame.parse(replace(message, payload=message.payload[:999]), 1000)


# ---- what a peer may not do --------------------------------------------------------------------


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    yield driver
    for address in list(driver.owned):
        driver.free(address)


@pytest.fixture
def place(driver: FakeDriver) -> DevicePlace:
    return DevicePlace("GPU-other", driver.export(driver.allocate(4096)), 4096)


@pytest.fixture
def decode() -> Iterator[PlaneRank]:
    with PlaneRank("d", listen_host=None, carrier="cuda_ipc") as rank:
        yield rank


@pytest.fixture
def sender(decode: PlaneRank) -> Iterator[FakeSender]:
    with FakeSender(PlaneRank("p", seed=1)) as sender:
        decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
        yield sender


@pytest.mark.parametrize(
    ("offset", "length", "reason"),
    [
        (4000, 97, "bytes 4000 to 4097 of a device's ring of 4096"),
        ((1 << 64) - 1, 1, "of a device's ring of 4096"),
        (0, 2049, "a frame with 2049 bytes of payload; the limit is 2048"),
        (0, 0, "a frame with 0 bytes of payload"),
    ],
)
def test_an_invalid_place_loses_the_peer(
    decode: PlaneRank, sender: FakeSender, place: DevicePlace, offset: int, length: int, reason: str
) -> None:
    sender.accept(device_ring=place)
    sender.tell(offset, length)
    failure = decode.log.wait(ReceiveFailed, 1)
    assert reason in failure.reason and failure.retriable
    until(lambda: _driver(decode).calls["close"] == 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"handle": b""}, "carrier: cuda_ipc only, and cannot open memory of GPU-other"),
        ({"handle": bytes(64)}, "cannot open memory of GPU-other from GPU-fake: open: "),
        ({"bytes": 4097}, "open: 4096 bytes, not 4097"),
    ],
)
def test_memory_that_differs_from_its_offer_is_not_used(
    decode: PlaneRank, sender: FakeSender, place: DevicePlace, changes: dict[str, Any], reason: str
) -> None:
    sender.accept(device_ring=replace(place, **changes))
    assert reason in decode.log.wait(ReceiveFailed, 1).reason


def test_garbage_on_a_device_is_refused_like_garbage_on_the_wire(
    decode: PlaneRank, sender: FakeSender, place: DevicePlace
) -> None:
    sender.accept(device_ring=place)
    for size in (0, 3, HEADER_BYTES, 99):
        sender.tell(0, 512, random.Random(size).randbytes(size))
    until(lambda: decode.plane.stats().frames_refused == 4)
    credits: list[int] = []
    until(lambda: _returned(sender, credits) == 4)


# ---- whose bytes are believed ------------------------------------------------------------------


def _overwritten(
    spoil: Callable[[Callable[[], None], HandRank], None],
) -> tuple[HandRank, HandRank]:
    """A transfer during which the sender's ring is overwritten at a time of the test's choice."""
    with World("cuda_ipc") as world:
        prefill, decode = world.rank("p", seed=1), world.rank("d", listen_host=None)
        spoil(lambda: prefill.loop._carriers["cuda_ipc"].ring._memory.view.fill_(255), decode)  # type: ignore[attr-defined]
        world.transfer(prefill, decode, 1, BLOCKS, first_token=0, end_token=END)
        world.until(lambda: bool(decode.log.of(Received) or decode.log.of(ReceiveFailed)))
        return prefill, decode


def test_a_slot_that_is_taken_back_before_it_was_read_is_not_believed() -> None:
    def spoil(overwrite: Callable[[], None], decode: HandRank) -> None:
        copy = _driver(decode).copy

        def late(into: int, source: int, length: int) -> None:
            overwrite()
            copy(into, source, length)

        _driver(decode).copy = late

    _, decode = _overwritten(spoil)
    before = [bytes(layer) for layer in make_cache().layers]
    assert "checksum" in decode.log.of(ReceiveFailed)[0].reason
    assert [bytes(layer) for layer in decode.cache.layers] == before
    assert decode.plane.stats().checksum_failures == 1


def test_a_sender_hears_of_the_end_when_its_memory_is_no_longer_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    close = DoorbellReader.close

    def end(bells: DoorbellReader) -> None:
        events.append("the pipe is closed")
        close(bells)

    monkeypatch.setattr(DoorbellReader, "close", end)
    with World("cuda_ipc") as world:
        prefill, decode = world.rank("p", seed=1), world.rank("d", listen_host=None)
        world.transfer(prefill, decode, 1, BLOCKS, first_token=0, end_token=END)
        world.until(lambda: bool(decode.log.of(Received)))
        _driver(decode).settle = lambda: events.append("nothing is copied")
    assert events == ["nothing is copied", "the pipe is closed"]


def test_what_a_sender_does_after_a_frame_was_read_changes_nothing() -> None:
    """Bytes are verified and scattered from this rank's own copy."""
    reads: list[tuple[int, int]] = []

    def spoil(overwrite: Callable[[], None], decode: HandRank) -> None:
        copy, scatter = _driver(decode).copy, decode.cache.scatter

        def noted(into: int, source: int, length: int) -> None:
            copy(into, source, length)
            reads.append((source, length))

        def late(*of: Any) -> None:
            source, length = reads[-1]
            ctypes.memset(source, 255, length)
            scatter(*of)

        _driver(decode).copy = noted
        decode.cache.scatter = late  # type: ignore[method-assign, assignment]

    prefill, decode = _overwritten(spoil)
    assert len(reads) > LAYERS
    assert decode.log.of(Received)
    assert rows(decode.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


# ---- two processes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_a_killed_sender_fails_the_attempt_and_its_memory_is_let_go(name: str) -> None:
    device = device_named(name)
    with PlaneRank("d", listen_host=None, carrier="cuda_ipc", device=device) as decode:
        with other("cuda_ipc", "send", 77, decode.config.epoch, device=name) as process:
            sender = peer("p", 77, read_json_line(process))
            fields = {"first_token": 0, "end_token": other_process.END}
            decode.expect(sender, 77, other_process.BLOCKS, **fields)
            go(process)
            until(lambda: decode.plane.stats().frames_received > 3)
        assert decode.log.wait(ReceiveFailed, 77, seconds=3).retriable
        if isinstance(device, FakeDevice):
            until(lambda: not device.driver.opened)
            calls = device.driver.calls
            assert calls["copy"] > 3 and calls["open"] == calls["close"] == 1
            with PlaneRank("p", seed=1, carrier="cuda_ipc") as again:
                hand_over(again, decode)


@pytest.mark.parametrize("name", DEVICES)
def test_a_killed_receiver_holds_nothing_and_the_next_one_gets_all(name: str) -> None:
    fields = {"first_token": 0, "end_token": other_process.END}
    timing = Timing(ping_seconds=0.2, silence_seconds=10.0)
    device = device_named(name)
    with PlaneRank("p", seed=1, carrier="cuda_ipc", device=device, timing=timing) as prefill:
        ends = prefill.config.epoch, json.dumps(asdict(prefill.plane.endpoints))
        with (
            other("cuda_ipc", "receive", 88, *ends, device=name) as first,
            other("cuda_ipc", "receive", 89, *ends, device=name) as second,
        ):
            assert read_json_line(first) == read_json_line(second) == "{}\n"
            prefill.open(peer("d", 88), 88, other_process.BLOCKS, **fields)
            count = other_process.END - 1  # it waits for the last token
            prefill.compute(88, 0, count, chunk=count)
            until(lambda: prefill.plane.stats().frames_sent > 3)
            first.kill()
            assert "lost d rank 0" in prefill.log.wait(SendFailed, 88).reason
            until(lambda: prefill.plane.stats().held_slots == 0)
            prefill.open(peer("d", 89), 89, other_process.BLOCKS, **fields)
            prefill.compute(89, 0, other_process.END, chunk=other_process.END)
            assert json.loads(read_json_line(second)) == contents(prefill.cache)
            prefill.log.wait(SendFinished, 89)  # before the receiver is killed too
