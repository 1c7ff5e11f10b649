"""Connections: many peers, slow peers, dead peers, wrong peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.shared.causes import Cause
from tandem.shared.errors import OverloadedError, StartupError, UnavailableError
from tandem.shared.handoff.plane.endpoint import DataPlane
from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    Cancelled,
    CancelSend,
    PeerLost,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from tandem.shared.handoff.plane.settings import DataPlaneConfig
from tandem.shared.handoff.wire import frame
from tandem.shared.handoff.wire.frame import Kind
from tandem.tests.shared.handoff.support.fake_peers import FakeReceiver, FakeSender
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    CELL,
    HEAD_BYTES,
    LAYERS,
    PlaneRank,
    expect,
    make_cache,
    rows,
    until,
)
from tandem.tests.support.layers_ready import layer_ready

pytestmark = pytest.mark.usefixtures("each_carrier")

END = 100
BLOCKS = tuple(range(13))


def _run(prefill: PlaneRank, decode: PlaneRank, transfer_id: int, base: int = 0) -> tuple[int, ...]:
    """Start one whole transfer; returns the receiving block table."""
    here = tuple(range(base, base + 13))
    decode.expect(prefill, transfer_id, here, first_token=0, end_token=END)
    prefill.open(decode, transfer_id, BLOCKS, first_token=0, end_token=END)
    prefill.compute(transfer_id, 0, END, chunk=33)
    return here


def test_one_prefill_rank_serves_many_decode_ranks() -> None:
    with PlaneRank("p", seed=1) as prefill:
        decodes = [PlaneRank(f"d{i}", listen_host=None).__enter__() for i in range(4)]
        try:
            tables = [_run(prefill, decode, i) for i, decode in enumerate(decodes)]
            for i, decode in enumerate(decodes):
                decode.log.wait(Received, i)
                prefill.log.wait(SendFinished, i)
                assert rows(decode.cache, tables[i], 0, END) == rows(prefill.cache, BLOCKS, 0, END)
        finally:
            for decode in decodes:
                decode.__exit__()


@pytest.mark.parametrize("each_carrier", ["tcp"], indirect=True)
def test_a_rank_beyond_max_peers_finds_no_place_and_the_others_are_served() -> None:
    with PlaneRank("p", seed=1, max_peers=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        here = _run(prefill, decode, 1)
        decode.log.wait(Received, 1)
        with PlaneRank("e", listen_host=None) as late:
            late.plane.submit(expect(prefill, 2, BLOCKS, first_token=0, end_token=END))
            failure = late.log.wait(ReceiveFailed, 2)
            assert "1 ranks are connected, which is the limit; see --max-peers" in failure.reason
            assert failure.retriable and failure.cause == Cause.NO_PLACE
        assert rows(decode.cache, here, 0, END) == rows(prefill.cache, BLOCKS, 0, END)
        _run(prefill, decode, 3)
        decode.log.wait(Received, 3)


def test_many_prefill_ranks_fill_one_decode_rank() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        prefills = [PlaneRank(f"p{i}", seed=i).__enter__() for i in range(4)]
        try:
            tables = [_run(prefill, decode, i, 13 * i) for i, prefill in enumerate(prefills)]
            for i, prefill in enumerate(prefills):
                decode.log.wait(Received, i)
                prefill.log.wait(SendFinished, i)
                assert rows(decode.cache, tables[i], 0, END) == rows(prefill.cache, BLOCKS, 0, END)
        finally:
            for prefill in prefills:
                prefill.__exit__()


def test_two_nodes_send_to_each_other_at_once_over_reused_connections() -> None:
    caches = [make_cache(blocks=6 * 13, seed=seed) for seed in (1, 2)]
    with PlaneRank("a", cache=caches[0]) as one, PlaneRank("b", cache=caches[1]) as two:
        for i in range(1, 6):
            _run(one, two, 2 * i, 13 * i)
            _run(two, one, 2 * i + 1, 13 * i)
        for i in range(1, 6):
            for source, target, transfer_id in ((one, two, 2 * i), (two, one, 2 * i + 1)):
                target.log.wait(Received, transfer_id)
                source.log.wait(SendFinished, transfer_id)
                here = range(13 * i, 13 * i + 13)
                assert rows(target.cache, here, 0, END) == rows(source.cache, BLOCKS, 0, END)
        assert not one.log.of(PeerLost) + two.log.of(PeerLost)


def test_a_receiver_that_grants_no_credit_does_not_slow_another() -> None:
    limits = {"window_bytes": 2 * 2048, "progress_seconds": 60.0}
    with (
        PlaneRank("p", seed=1) as prefill,
        PlaneRank("d", listen_host=None) as decode,
        FakeReceiver(PlaneRank("slow"), prefill) as slow,
    ):
        prefill.open(slow, 1, BLOCKS, first_token=0, end_token=END, **limits)
        prefill.compute(1, 0, END, chunk=END)
        slow.take(), slow.take()
        for i in range(2, 7):
            _run(prefill, decode, i)
            prefill.log.wait(SendFinished, i)
        # Exactly the window has left, and nothing more.
        until(lambda: prefill.plane.stats().credit_in_flight <= 2 * 2048)
        assert not prefill.log.of(SendFailed)
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
        prefill.log.wait(Cancelled, 1)
        assert slow.next(Kind.ABORT)[0].transfer_id == 1


def test_a_receiver_without_progress_fails_its_transfer_alone() -> None:
    with PlaneRank("p", seed=1) as prefill, FakeReceiver(PlaneRank("slow"), prefill) as slow:
        prefill.open(slow, 1, BLOCKS, first_token=0, end_token=END, progress_seconds=0.2)
        prefill.compute(1, 0, END, chunk=END)
        assert "no progress" in prefill.log.wait(SendFailed, 1).reason


def test_a_dead_receiver_is_noticed() -> None:
    with PlaneRank("p", seed=1) as prefill:
        slow = FakeReceiver(PlaneRank("slow"), prefill)
        prefill.open(slow, 1, BLOCKS, first_token=0, end_token=END)
        slow.__exit__()
        prefill.compute(1, 0, 50, chunk=50)
        prefill.log.wait(SendFailed, 1)
        lost = prefill.log.wait(PeerLost)
        assert (lost.node_id, lost.epoch) == ("slow", slow.epoch)


def test_a_dead_sender_is_noticed() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        with FakeSender(PlaneRank("p")) as sender:
            sender.expected_by(decode, 1, BLOCKS, first_token=0, end_token=END)
            sender.send(sender.data(1, 0, 0, 0, 8))
            until(lambda: decode.plane.stats().frames_received == 1)
        failure = decode.log.wait(ReceiveFailed, 1)
        assert failure.retriable
        assert decode.log.wait(PeerLost).node_id == "p"


def test_a_sender_that_is_not_there_fails_the_attempt() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        with FakeSender(PlaneRank("p")) as sender:
            command = expect(sender, 1, BLOCKS, first_token=0, end_token=END)
        decode.plane.submit(command)
        assert decode.log.wait(ReceiveFailed, 1).retriable


@pytest.mark.parametrize("socket", ["bulk", "control"])
def test_one_connection_that_ends_is_noticed_at_once_by_the_receiver(socket: str) -> None:
    with PlaneRank("d", listen_host=None) as decode, FakeSender(PlaneRank("p")) as sender:
        sender.expected_by(decode, 1, BLOCKS, first_token=0, end_token=END)
        sender.end(socket)
        failure = decode.log.wait(ReceiveFailed, 1)
        assert failure.retriable and "the connection ended" in failure.reason
        assert decode.log.wait(PeerLost).cause == "peer_lost"


def test_a_receiver_meets_others_after_many_connections_have_ended() -> None:
    """Both connections of a pair end at once, one while the other's end is handled."""
    with PlaneRank("d", listen_host=None) as decode:
        for transfer_id in range(30):
            with FakeSender(PlaneRank("p")) as sender:
                sender.expected_by(decode, transfer_id, BLOCKS, first_token=0, end_token=END)
            decode.log.wait(ReceiveFailed, transfer_id)


def test_a_port_without_a_listener_is_noticed_at_once() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        with FakeSender(PlaneRank("p")) as sender:
            command = expect(sender, 1, BLOCKS, first_token=0, end_token=END)
        decode.plane.submit(command)
        assert "nothing listens there" in decode.log.wait(ReceiveFailed, 1).reason


def test_a_peer_that_comes_back_is_greeted_again() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        with PlaneRank("p", seed=1) as prefill:
            _run(prefill, decode, 1)
            decode.log.wait(Received, 1)
            prefill.log.wait(SendFinished, 1)
        decode.log.wait(PeerLost)
        with PlaneRank("p", seed=3) as prefill:
            here = _run(prefill, decode, 2)
            decode.log.wait(Received, 2)
            prefill.log.wait(SendFinished, 2)
            assert rows(decode.cache, here, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def test_another_start_of_the_sender_is_refused_by_epoch() -> None:
    with PlaneRank("d", listen_host=None) as decode, PlaneRank("p") as prefill:
        decode.plane.submit(
            expect(prefill, 1, BLOCKS, first_token=0, end_token=END, peer_epoch=12345)
        )
        failure = decode.log.wait(ReceiveFailed, 1)
        assert "epoch: p was 0000000000003039" in failure.reason
        assert not failure.retriable


def test_a_sender_of_another_shape_is_refused_by_field_and_values() -> None:
    cache = make_cache(head_bytes=HEAD_BYTES // 2)
    with PlaneRank("d", listen_host=None, cache=cache) as decode, PlaneRank("p") as prefill:
        decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
        failed = decode.log.wait(ReceiveFailed, 1)
        assert "KV of layer 0: here K 8, V 8, at d K 4, V 4" in failed.reason
        assert not failed.retriable


def test_a_receiver_checks_the_welcome_as_well() -> None:
    with PlaneRank("d", listen_host=None) as decode, FakeSender(PlaneRank("p")) as sender:
        decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
        sender.accept(layers=["latent 5"] * LAYERS)
        failed = decode.log.wait(ReceiveFailed, 1)
        assert "KV of layer 0: here K 8, V 8, at p latent 5" in failed.reason
        assert not failed.retriable


def test_an_ack_beyond_what_was_sent_fails_the_transfer() -> None:
    with PlaneRank("p", seed=1) as prefill, FakeReceiver(PlaneRank("d"), prefill) as receiver:
        prefill.open(receiver, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, 1, chunk=1)
        receiver.take()
        receiver.send(Kind.ACK, 1, frame.ack_payload(10**9), sequence=1)
        assert "bytes acknowledged" in prefill.log.wait(SendFailed, 1).reason


def test_an_ack_for_an_unknown_transfer_gets_an_abort() -> None:
    with PlaneRank("p") as prefill, FakeReceiver(PlaneRank("d"), prefill) as receiver:
        receiver.send(Kind.ACK, 77, frame.ack_payload(0))
        assert receiver.next(Kind.ABORT)[0].transfer_id == 77


def test_acks_of_another_epoch_grant_nothing() -> None:
    with PlaneRank("p", seed=1) as prefill, FakeReceiver(PlaneRank("d"), prefill) as receiver:
        prefill.open(receiver, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, 1, chunk=1)
        receiver.take()
        receiver.send(Kind.ACK, 1, frame.ack_payload(LAYERS * CELL), receiver_epoch=3)
        until(lambda: prefill.plane.stats().frames_stale == 1)
        assert prefill.plane.stats().bytes_acknowledged == 0
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
        prefill.log.wait(Cancelled, 1)


def test_a_nack_fails_the_attempt_with_its_reason() -> None:
    with PlaneRank("p", seed=1) as prefill, FakeReceiver(PlaneRank("d"), prefill) as receiver:
        prefill.open(receiver, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, 1, chunk=1)
        receiver.take()
        receiver.send(Kind.NACK, 1, b"bad checksum")
        assert "bad checksum" in prefill.log.wait(SendFailed, 1).reason


@pytest.mark.parametrize("phase", ["before_open", "opened", "streaming", "finished", "unknown"])
@pytest.mark.parametrize("side", ["send", "receive"])
def test_cancel_gets_a_reply_in_every_phase(phase: str, side: str) -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        if phase != "unknown":
            decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        if phase in ("opened", "streaming", "finished"):
            prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
        if phase in ("streaming", "finished"):
            prefill.compute(1, 0, END if phase == "finished" else 50, chunk=10)
            until(lambda: decode.plane.stats().frames_received > 0)
        if phase == "finished":
            prefill.log.wait(SendFinished, 1)
            decode.log.wait(Received, 1)
        if side == "send":
            prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
            assert prefill.log.wait(Cancelled, 1).side == "send"
        else:
            decode.plane.submit(CancelExpect(transfer_id=1, attempt=1))
            assert decode.log.wait(Cancelled, 1).side == "receive"
        if phase == "streaming":  # the other side learns of it
            if side == "send":
                assert "cancelled" in decode.log.wait(ReceiveFailed, 1).reason
            else:
                assert "cancelled" in prefill.log.wait(SendFailed, 1).reason
        # A cancelled attempt stays over, and a newer one is welcome.
        fields = {"first_token": 0, "end_token": END, "attempt": 2}
        decode.expect(prefill, 2, BLOCKS, **fields)
        prefill.open(decode, 2, BLOCKS, **fields)
        prefill.compute(2, 0, END, chunk=END, attempt=2)
        prefill.log.wait(SendFinished, 2)


def test_an_attempt_that_is_over_cannot_be_opened_again() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        decode.plane.submit(CancelExpect(transfer_id=1, attempt=2))
        decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
        assert "is over" in decode.log.wait(ReceiveFailed, 1).reason
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=2))
        prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
        assert "is over" in prefill.log.wait(SendFailed, 1).reason


def test_a_newer_attempt_takes_the_place_of_the_older_one() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        for attempt in (1, 2):
            fields = {"first_token": 0, "end_token": END, "attempt": attempt}
            decode.expect(prefill, 1, BLOCKS, **fields)
            prefill.open(decode, 1, BLOCKS, **fields)
            prefill.compute(1, 0, 30 if attempt == 1 else END, chunk=30, attempt=attempt)
        assert decode.log.wait(Received, 1).attempt == 2
        assert prefill.log.wait(SendFinished, 1).attempt == 2
        assert decode.log.wait(ReceiveFailed, 1).attempt == 1
        assert prefill.log.wait(SendFailed, 1).attempt == 1


def test_a_window_of_two_cells_does_not_deadlock() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        fields = {"first_token": 0, "end_token": END, "window_bytes": 2 * CELL}
        decode.expect(prefill, 1, BLOCKS, **fields)
        prefill.open(decode, 1, BLOCKS, **fields)
        prefill.compute(1, 0, END, chunk=END)
        prefill.log.wait(SendFinished, 1)
        assert prefill.plane.stats().frames_sent == LAYERS * END


def test_a_frame_is_no_larger_than_its_receiver_takes() -> None:
    small = PlaneRank("d", slot_bytes=3 * CELL, listen_host=None)
    with PlaneRank("p", seed=1, slot_bytes=100 * CELL) as prefill, small as decode:
        decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, END, chunk=END)
        prefill.log.wait(SendFinished, 1)
        assert prefill.plane.stats().frames_sent == LAYERS * -(-END // 3)
        assert rows(decode.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


@pytest.mark.parametrize("each_carrier", ["tcp"], indirect=True)
def test_a_receiver_that_takes_less_than_a_token_is_refused_by_value() -> None:
    tiny = PlaneRank("d", slot_bytes=CELL - 1)
    with PlaneRank("p", seed=1) as prefill, FakeReceiver(tiny, prefill) as receiver:
        prefill.open(receiver, 1, BLOCKS, first_token=0, end_token=END)
        prefill.compute(1, 0, END, chunk=END)
        reason = prefill.log.wait(SendFailed, 1).reason
        assert f"accepts {CELL - 1} bytes of payload; one token has more" in reason


def test_a_window_that_is_too_small_is_refused_by_value() -> None:
    with PlaneRank("p") as prefill:
        prefill.open(PlaneRank("d"), 1, BLOCKS, first_token=0, end_token=END, window_bytes=CELL)
        assert f"window of {CELL} bytes" in prefill.log.wait(SendFailed, 1).reason


def test_a_cache_that_cannot_pack_fails_its_transfer_alone() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        prefill.open(decode, 1, BLOCKS[:1], first_token=0, end_token=END)
        prefill.compute(1, BLOCK, END, chunk=END)
        assert "packing failed" in prefill.log.wait(SendFailed, 1).reason
        assert "packing failed" in decode.log.wait(ReceiveFailed, 1).reason
        _run(prefill, decode, 2)
        prefill.log.wait(SendFinished, 2)


def test_stopping_fails_running_transfers() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        with PlaneRank("p", seed=1) as prefill:
            decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
            prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
            prefill.compute(1, 0, 50, chunk=50)
        assert "shutting down" in prefill.log.wait(SendFailed, 1).reason
        assert decode.log.wait(ReceiveFailed, 1).retriable


def test_commands_queued_before_a_stop_complete_and_later_ones_are_refused() -> None:
    for _ in range(20):
        with PlaneRank("p") as prefill:
            prefill.open(PlaneRank("d"), 1, BLOCKS, first_token=0, end_token=END)
            prefill.plane.submit(CancelSend(transfer_id=2, attempt=1))
        assert "shutting down" in prefill.log.wait(SendFailed, 1, seconds=1).reason
        prefill.log.wait(Cancelled, 2, seconds=1)
        with pytest.raises(UnavailableError, match="has ended"):
            layer_ready(prefill.plane, 1, 1, 0, 0, 1)


def test_a_rank_that_only_receives_refuses_to_send() -> None:
    with PlaneRank("d", listen_host=None) as decode:
        decode.open(PlaneRank("e"), 1, BLOCKS, first_token=0, end_token=END)
        assert "without listen_host" in decode.log.wait(SendFailed, 1).reason


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "", "tcp://", "tcp://127.0.0.1:nonsense"])
def test_an_endpoint_that_is_no_tcp_address_fails_the_attempt(endpoint: str) -> None:
    with PlaneRank("d", listen_host=None) as decode, PlaneRank("p") as prefill:
        command = expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        decode.plane.submit(replace(command, bulk=endpoint))
        decode.log.wait(ReceiveFailed, 1)


def test_a_full_command_queue_raises_an_error() -> None:
    config = DataPlaneConfig(node_id="p", epoch=1, max_commands=2)
    plane = DataPlane(config, make_cache(), lambda event: None)
    layer_ready(plane, 1, 1, 0, 0, 1)
    layer_ready(plane, 1, 1, 1, 0, 1)
    with pytest.raises(OverloadedError, match="2 commands"):
        layer_ready(plane, 1, 1, 2, 0, 1)
    plane.stop()


def test_a_port_that_cannot_be_bound_fails_the_start() -> None:
    config = DataPlaneConfig(node_id="p", epoch=1, listen_host="203.0.113.7")
    plane = DataPlane(config, make_cache(), lambda event: None)
    with pytest.raises(StartupError, match="cannot start"):
        plane.start()
    plane.stop()


def test_a_slot_smaller_than_a_token_fails_the_start() -> None:
    config = DataPlaneConfig(node_id="p", epoch=1, slot_bytes=CELL - 1)
    plane = DataPlane(config, make_cache(), lambda event: None)
    with pytest.raises(StartupError, match="raise the slot size"):
        plane.start()
    plane.stop()
