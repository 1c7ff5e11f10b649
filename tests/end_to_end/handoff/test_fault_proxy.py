"""The proxy itself: it breaks exactly the given wire, at the given byte."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tandem.tests.end_to_end.handoff.fault_proxy import DOWN, UP, FaultProxy, Wire, running_proxy
from tandem.tests.end_to_end.support.cluster import until

DATA = bytes(range(256)) * 1000
SECONDS = 10.0


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with running_proxy() as proxy:
        yield proxy


@pytest.fixture
def ends(proxy: FaultProxy) -> Iterator[tuple[Wire, socket.socket, socket.socket]]:
    """A wire, and the two ends of a connection through it: client and server."""
    wire = proxy.wire()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire.target = listener.getsockname()
        with socket.create_connection(("127.0.0.1", wire.port), SECONDS) as client:
            listener.settimeout(SECONDS)
            server, _ = listener.accept()
            server.settimeout(SECONDS)
            with server:
                yield wire, client, server


def take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def sending(sock: socket.socket) -> threading.Thread:
    thread = threading.Thread(target=lambda: sock.sendall(DATA))
    thread.start()
    return thread


def test_everything_passes_both_ways_and_is_counted(ends: tuple) -> None:
    wire, client, server = ends
    server.sendall(b"down")
    client.sendall(b"up")
    assert (take(client, 4), take(server, 2)) == (b"down", b"up")
    assert (wire.passed(DOWN), wire.passed(UP)) == (4, 2)
    server.close()
    assert client.recv(1) == b""


def test_a_hole_holds_exactly_what_comes_after_the_mark(ends: tuple) -> None:
    wire, client, server = ends
    mark = wire.when(DOWN, 1000, lambda: wire.hole(DOWN))
    thread = sending(server)
    assert take(client, 1000) == DATA[:1000]
    assert mark.fired.wait(SECONDS) and wire.passed(DOWN) == 1000
    client.sendall(b"the other way is open")
    assert take(server, 21)
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    wire.heal()
    client.settimeout(SECONDS)
    assert take(client, len(DATA) - 1000) == DATA[1000:]
    thread.join()


def test_a_hole_hides_that_the_other_end_is_gone(ends: tuple) -> None:
    wire, client, server = ends
    wire.hole(DOWN, UP)
    server.close()
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    wire.heal()
    client.settimeout(SECONDS)
    assert client.recv(1) == b""


def test_one_bit_is_turned_and_one_chunk_comes_twice(ends: tuple) -> None:
    wire, client, server = ends
    wire.when(DOWN, 500, lambda: wire.flip(DOWN))
    thread = sending(server)
    received = take(client, len(DATA))
    assert [i for i in range(len(DATA)) if received[i] != DATA[i]] == [500] and received[
        500
    ] ^ DATA[500] == 1
    thread.join()
    wire.duplicate(DOWN)
    server.sendall(b"again")
    assert take(client, 10) == b"againagain"


def test_a_reset_is_one(ends: tuple) -> None:
    wire, client, server = ends
    wire.when(DOWN, 0, wire.reset)
    server.sendall(DATA[:10])
    for end in (client, server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_slow_wire_keeps_its_rate(ends: tuple) -> None:
    wire, client, server = ends
    wire.slow(DOWN, rate=10 * len(DATA))
    thread = sending(server)
    mark = wire.when(DOWN, len(DATA), lambda: None)
    start = time.monotonic()
    assert take(client, len(DATA)) == DATA
    thread.join()
    assert mark.fired.wait(SECONDS)
    assert mark.fired_at - start > 0.05


def test_a_target_that_does_not_listen_resets_the_client(proxy: FaultProxy) -> None:
    first, second = proxy.two_wires()
    assert second.port == first.port + 1
    address = ("127.0.0.1", first.port)
    # It may come before connect has returned.
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(address, SECONDS) as client,
    ):
        client.recv(1)
    until(lambda: not first._writers, "the connection to be forgotten")
