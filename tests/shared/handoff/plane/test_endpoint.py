"""Whole transfers over real sockets."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from functools import partial

import pytest

from tandem.shared.errors import StartupError
from tandem.shared.handoff.carriers.tcp.carrier import TcpCarrier
from tandem.shared.handoff.plane.messages import (
    CancelExpect,
    Cancelled,
    Received,
    ReceiveFailed,
    SendFinished,
)
from tandem.tests.shared.handoff.support.by_hand import HandRank
from tandem.tests.shared.handoff.support.plane_pair import BLOCK, CELL, LAYERS, PlaneRank, rows

pytestmark = pytest.mark.usefixtures("every_carrier")


def _table(source: random.Random, tokens: int, blocks: int = 64) -> tuple[int, ...]:
    return tuple(source.sample(range(blocks), -(-tokens // BLOCK)))


@pytest.mark.parametrize(
    ("first", "end", "chunk"), [(0, 1, 1), (0, 19, 7), (5, 99, 40), (17, 18, 5), (1, 200, 200)]
)
def test_transfer_of_odd_size_arrives_whole_and_touches_nothing_else(
    first: int, end: int, chunk: int
) -> None:
    source = random.Random(end)
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", seed=2, listen_host=None) as decode:
        there, here = _table(source, end), _table(source, end)
        untouched = rows(decode.cache, range(64), 0, 64 * BLOCK)
        decode.expect(prefill, 7, here, first_token=first, end_token=end)
        prefill.open(decode, 7, there, first_token=first, end_token=end)
        # The prefill node computes the whole prompt; only what is missing there may travel.
        prefill.compute(7, 0, end, chunk=chunk)
        received = decode.log.wait(Received, 7)
        finished = prefill.log.wait(SendFinished, 7)
        missing = LAYERS * (end - first) * CELL
        assert received.bytes == finished.bytes == missing
        assert prefill.plane.stats().bytes_sent == decode.plane.stats().bytes_received == missing
        assert 0 <= finished.exposed_seconds < 5
        assert rows(decode.cache, here, first, end) == rows(prefill.cache, there, first, end)
        count = sum(
            a != b
            for a, b in zip(untouched, rows(decode.cache, range(64), 0, 64 * BLOCK), strict=True)
        )
        assert count == LAYERS * (end - first)


def _two_free_ports() -> int:
    """The first of two neighbours that were free a moment ago."""
    for _ in range(100):
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports side by side")


def test_ports_can_be_fixed_for_a_firewall() -> None:
    port = _two_free_ports()
    with (
        PlaneRank("p", seed=1, listen_port=port) as prefill,
        PlaneRank("d", listen_host=None) as decode,
    ):
        assert prefill.plane.endpoints.bulk == f"tcp://127.0.0.1:{port}"
        assert prefill.plane.endpoints.control == f"tcp://127.0.0.1:{port + 1}"
        decode.expect(prefill, 1, [0], first_token=0, end_token=1)
        with pytest.raises(StartupError, match=f"127.0.0.1:{port} for KV.*--kv-port"):
            PlaneRank("other", listen_port=port).plane.start()


def test_an_address_of_another_machine_is_refused_with_the_remedy() -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1:\* for KV.*--kv-host"):
        PlaneRank("p", listen_host="192.0.2.1").plane.start()


def test_an_attempt_that_is_over_is_not_received_again() -> None:
    span = {"first_token": 0, "end_token": 99}
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", seed=2, listen_host=None) as decode:
        decode.expect(prefill, 1, list(range(20)), **span)
        prefill.open(decode, 1, list(range(20)), **span)
        prefill.compute(1, 0, 99, chunk=99)
        decode.log.wait(Received, 1)
        decode.expect(prefill, 1, list(range(20)), **span)
        assert decode.log.wait(ReceiveFailed, 1).reason == "attempt 1 is over"


def test_libraries_are_loaded_for_the_allowed_carriers_alone() -> None:
    prepared: list[str] = []
    kinds = tuple(
        type(name, (TcpCarrier,), {"name": name, "prepare": partial(prepared.append, name)})
        for name in ("tcp", "other")
    )
    with PlaneRank("p", carrier="tcp", carriers=kinds):
        assert prepared == ["tcp"]


def test_a_command_that_waits_at_the_end_gets_its_event() -> None:
    with HandRank("d", listen_host=None) as decode:
        decode.plane.submit(CancelExpect(transfer_id=1, attempt=1))
    assert [event.transfer_id for event in decode.log.of(Cancelled)] == [1]
