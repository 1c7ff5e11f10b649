"""Unknown connections to a data plane, locked or not: dropped, counted, and no hindrance."""

from __future__ import annotations

import pickle
import random
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from tandem.shared.errors import PeerRefusedError
from tandem.shared.handoff.carriers.zeromq import dialer as zmq_dialer
from tandem.shared.handoff.carriers.zeromq import listener as zmq_listener
from tandem.shared.handoff.carriers.zeromq import listening_port, password
from tandem.shared.handoff.carriers.zeromq.curve import check_keys
from tandem.shared.handoff.carriers.zeromq.listening_port import ListeningPort
from tandem.shared.handoff.carriers.zeromq.sockets import MAX_CONTROL_MESSAGE, Timing
from tandem.shared.handoff.plane.loop import greeting_of
from tandem.shared.handoff.plane.messages import AdmitKeys, KeysAdmitted, PeerJoined, ReceiveFailed
from tandem.shared.handoff.wire import greeting
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCKS,
    END,
    PlaneRank,
    expect,
    hand_over,
    until,
)

# Of connections that wait to be let in.
BRIEF = Timing(ping_seconds=0.2, silence_seconds=1.0)

# ZMTP 3.1: signature, version, mechanism, as server, filler.
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01%b" + bytes(32)
NULL, PLAIN, CURVE = (ZMTP % name.ljust(20, b"\0") for name in (b"NULL", b"PLAIN", b"CURVE"))
# The user is right.
HELLO = b"\x04\x1d\x05HELLO\x06tandem\x0fnot-an-epoch-16"
READY = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER"

RAW = {
    "nothing": b"",
    "garbage": random.Random(7).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nhost: kv\r\n\r\n",
    "pickle": pickle.dumps({"x": list(range(50))}),
    "another version": b"\xff" + bytes(8) + b"\x7f\x01\x00" + bytes(52),
    "plain, a pickle": NULL + READY + b"\x00\x40" + pickle.dumps([0] * 20).ljust(64, b"."),
    "plain, 4 GiB": NULL + READY + b"\x02" + struct.pack(">Q", 1 << 32),
    "plain, 2^63": NULL + READY + b"\x02" + struct.pack(">Q", 1 << 63),
    "plain, another epoch": PLAIN + HELLO,
    "plain, 2^63 in the handshake": PLAIN + b"\x06" + struct.pack(">Q", 1 << 63),
    "curve, garbage": CURVE + b"\x04\xc8" + random.Random(8).randbytes(200),
    "curve, 4 GiB": CURVE + b"\x06" + struct.pack(">Q", 1 << 32),
    "curve, 2^63": CURVE + b"\x06" + struct.pack(">Q", 1 << 63),
}


@pytest.fixture(params=["locked", "open"])
def prefill(request: pytest.FixtureRequest) -> Iterator[PlaneRank]:
    with PlaneRank("p", seed=1, curve=request.param == "locked", timing=BRIEF) as rank:
        yield rank


@pytest.fixture
def locked(each_carrier: str) -> Iterator[PlaneRank]:
    with PlaneRank("p", seed=1, curve=True, timing=BRIEF) as rank:
        yield rank


def admit(rank: PlaneRank, *keys: str, version: int = 1) -> None:
    rank.plane.submit(AdmitKeys(version=version, keys=keys))
    until(lambda: any(event.version == version for event in rank.log.of(KeysAdmitted)))


def hands_over(prefill: PlaneRank, version: int = 99) -> str:
    """A decode rank that the control plane has announced gets its KV; the carrier."""
    with PlaneRank("d", listen_host=None, curve=prefill.config.curve) as decode:
        admit(prefill, decode.plane.endpoints.key, version=version)
        hand_over(prefill, decode)
        return decode.log.wait(PeerJoined).carrier


def ports(rank: PlaneRank) -> list[int]:
    ends = rank.plane.endpoints
    return [int(end.rpartition(":")[2]) for end in (ends.bulk, ends.control)]


def test_an_announced_rank_is_let_in(locked: PlaneRank, each_carrier: str) -> None:
    assert hands_over(locked) == each_carrier
    assert locked.plane.stats().unknown_connections == locked.plane.stats().keys_refused == 0


def test_every_start_has_a_key_of_its_own(locked: PlaneRank) -> None:
    with PlaneRank("p", curve=True) as other, PlaneRank("q") as plain:
        keys = {rank.plane.endpoints.key for rank in (locked, other)}
        assert len(keys) == 2 and all(len(key) == 40 for key in keys)
        assert plain.plane.endpoints.key == ""


def test_an_unannounced_rank_is_refused_and_counted(locked: PlaneRank) -> None:
    with PlaneRank("d", listen_host=None, curve=True, timing=BRIEF) as decode:
        decode.plane.submit(expect(locked, 1, BLOCKS, first_token=0, end_token=END))
        assert decode.log.wait(ReceiveFailed, 1).retriable
        # Of its two sockets the second is given up when the first one is refused.
        until(lambda: locked.plane.stats().keys_refused in (1, 2))
        until(lambda: locked.plane.stats().unknown_connections in (1, 2))
    hands_over(locked)


def test_a_rank_that_was_dismissed_is_a_stranger_again(locked: PlaneRank) -> None:
    with PlaneRank("d", listen_host=None, curve=True) as decode:
        admit(locked, decode.plane.endpoints.key)
        admit(locked, "", "no key", "\0" * 40, "~" * 40, version=2)
        decode.plane.submit(expect(locked, 1, BLOCKS, first_token=0, end_token=END))
        decode.log.wait(ReceiveFailed, 1)
        until(lambda: locked.plane.stats().keys_refused in (1, 2))


def test_an_unlocked_rank_gets_no_reply_from_a_locked_one(locked: PlaneRank) -> None:
    with PlaneRank("d", listen_host=None, timing=BRIEF) as decode:
        decode.plane.submit(expect(locked, 1, BLOCKS, first_token=0, end_token=END))
        assert "only one side is locked" in decode.log.wait(ReceiveFailed, 1).reason
        until(lambda: locked.plane.stats().unknown_connections in (1, 2))
    hands_over(locked)


@pytest.fixture(params=["before", "after"])
def greeted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greetings of decode ranks are sent before or after their first connection has failed."""
    if request.param == "before":
        return
    dialled: list[zmq.Socket[bytes]] = []
    watched, encode = zmq_dialer.watched_socket, greeting.encode

    def noted(*args: Any) -> Any:
        socket, watch = watched(*args)
        dialled.append(socket)
        return socket, watch

    def late(hello: greeting.Greeting) -> bytes:
        if dialled:
            bulk = dialled[0]
            dialled.clear()
            until(lambda: not int(bulk.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
        return encode(hello)

    monkeypatch.setattr(zmq_dialer, "watched_socket", noted)
    monkeypatch.setattr(greeting, "encode", late)


@pytest.mark.usefixtures("greeted")
def test_a_reply_without_the_announced_key_is_rejected(locked: PlaneRank) -> None:
    """A stranger listens at the address of a prefill rank."""
    with (
        PlaneRank("d", listen_host=None, curve=True) as decode,
        PlaneRank("p", curve=True) as other,
    ):
        admit(locked, decode.plane.endpoints.key)
        command = expect(locked, 1, BLOCKS, first_token=0, end_token=END)
        fields = {name: getattr(command, name) for name in command.__slots__}
        decode.plane.submit(type(command)(**(fields | {"key": other.plane.endpoints.key})))
        assert "only one side is locked" in decode.log.wait(ReceiveFailed, 1).reason
        assert locked.plane.stats().keys_refused == 0


@pytest.mark.parametrize("curve", [True, False])
@pytest.mark.parametrize("kind", RAW)
def test_raw_bytes_are_dropped_and_counted(kind: str, curve: bool) -> None:
    brief = Timing(ping_seconds=0.1, silence_seconds=0.2)
    with PlaneRank("p", curve=curve, timing=brief) as prefill:
        for port in ports(prefill):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(RAW[kind])
        until(lambda: prefill.plane.stats().unknown_connections == 2)


def test_a_hundred_unknown_connections_are_no_hindrance(prefill: PlaneRank) -> None:
    sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports(prefill) * 50]
    try:
        for number, each in enumerate(sockets):
            each.sendall(list(RAW.values())[number % len(RAW)])
        hands_over(prefill)
        until(lambda: prefill.plane.stats().unknown_connections == 100)
    finally:
        for each in sockets:
            each.close()


def _stream(port: int, first: bytes, again: bytes, limit: int) -> int:
    """The number of bytes that a raw client can send before it is cut off."""
    count = 0
    with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
        stranger.settimeout(10)
        stranger.sendall(first)
        while count < limit:
            count += stranger.send(again)
    return count


def test_a_message_without_end_is_cut_off_and_costs_no_memory(prefill: PlaneRank) -> None:
    """Each part of it is short enough, and more is always announced."""
    part = b"\x01\xff" + bytes(255)
    before = psutil.Process().memory_info().rss
    for port in ports(prefill):
        for opening in (NULL + READY, PLAIN + HELLO, CURVE):
            assert _stream(port, opening, part * 256, 256 << 20) < 64 << 20
    assert psutil.Process().memory_info().rss - before < 32 << 20
    hands_over(prefill)


def test_a_flood_of_half_greetings_does_not_block_peers() -> None:
    """Also from a client that knows the epoch."""
    with PlaneRank("p", seed=1) as prefill, zmq.Context() as context:
        flood = context.socket(zmq.DEALER)
        flood.setsockopt(zmq.LINGER, 0)
        password.show(flood, prefill.config.epoch)
        flood.connect(prefill.plane.endpoints.control)
        me = greeting_of(prefill.config, prefill.cache, {"tcp": b""})
        for number in range(3000):
            flood.send(greeting.encode(replace(me, node_id="x", connection=number)))
        hands_over(prefill)
        flood.close(0)


@pytest.mark.parametrize("curve", [True, False])
def test_silent_connections_are_limited(monkeypatch: pytest.MonkeyPatch, curve: bool) -> None:
    """Peers that are connected go on, and others get in once the handshakes of those who say
    nothing are overdue."""
    listeners: list[ListeningPort] = []

    class Known(ListeningPort):
        def __init__(self, bound: Any) -> None:
            super().__init__(bound)
            listeners.append(self)

    monkeypatch.setattr(zmq_listener, "ListeningPort", Known)
    monkeypatch.setattr(listening_port, "MAX_UNKNOWN", 20)
    with (
        PlaneRank("p", seed=1, curve=curve) as prefill,
        PlaneRank("e", listen_host=None, curve=curve) as old,
    ):
        admit(prefill, old.plane.endpoints.key)
        hand_over(prefill, old, 5)
        accepted = [port.accepted for port in listeners]
        silent = [_dialling(port) for port in ports(prefill) * 30]
        try:
            until(lambda: not any(port.admits for port in listeners))
            late = [_dialling(port) for port in ports(prefill) * 30]
            silent += late
            hand_over(prefill, old, 6)
            # Those that had connected before the port was shut may be let in still, the late never.
            for one, before in zip(listeners, accepted, strict=True):
                assert one.accepted <= before + 30
            assert not select.select([], late, [], 0)[1]
        finally:
            for each in silent:
                each.close()
        until(lambda: all(port.admits for port in listeners))
        hands_over(prefill)


def _dialling(port: int) -> socket.socket:
    """A connection that is being made, or has been."""
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex(("127.0.0.1", port))
    return stranger


def test_a_port_pauses_when_it_cannot_accept() -> None:
    """ZeroMQ would try again without a pause."""
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        port = ListeningPort(router)
        endpoint = port.listen("127.0.0.1", 0)
        message = struct.pack("=hi", zmq.EVENT_ACCEPT_FAILED, 24), endpoint.encode()
        fake: Any = SimpleNamespace(recv_multipart=_once(message))
        port.monitor, real = fake, port.monitor
        port.update(0, now=100.0)
        assert not port.admits
        port.update(0, now=100.5)
        assert not port.admits
        port.update(0, now=101.5)
        assert port.admits
        port.monitor = real
        with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
            until(lambda: port.update(0, now=102.0) or port.accepted == 1)
        port.close()


def _once(message: tuple[bytes, ...]) -> Any:
    messages = [message]

    def receive(flags: int) -> tuple[bytes, ...]:
        if not messages:
            raise zmq.Again
        return messages.pop()

    return receive


def test_a_message_beyond_a_greeting_drops_the_connection_of_a_client(prefill: PlaneRank) -> None:
    """Also on the bulk port, where only the frames that go out are large."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.connect(prefill.plane.endpoints.bulk)
        with suppress(zmq.Again):  # a locked port may have dropped it already
            client.send(bytes(2 * MAX_CONTROL_MESSAGE), zmq.NOBLOCK)
        assert monitor.poll(10_000)
        until(lambda: prefill.plane.stats().unknown_connections == 1)
    finally:
        client.disable_monitor()
        context.destroy(linger=0)


@pytest.mark.parametrize("keys", [[], ["x"], ["x" * 39 + "~"], ["x" * 40, "x" * 40], ["é" * 40]])
def test_a_node_without_a_sound_key_for_each_rank_is_refused(keys: list[str]) -> None:
    with pytest.raises(PeerRefusedError, match="node-3 announces"):
        check_keys(keys, 1, "node-3")


def test_a_locked_node_and_an_open_one_never_hand_over() -> None:
    public, _ = zmq.curve_keypair()
    check_keys([public.decode()], 1, "node-3")
    with pytest.raises(PeerRefusedError, match="1 CURVE keys, and 0 are expected"):
        check_keys([public.decode()], 0, "node-3")
