"""A kind of carrier defined in this file: frames as datagrams over a Unix socket."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.config import HandoffConfig
from tandem.shared.errors import StartupError
from tandem.shared.handoff.carriers.base import (
    MAX_SLOTS,
    Carrier,
    CarrierUnavailableError,
    FrameReader,
    FrameWriter,
    Loan,
    Loans,
    RankResources,
    ReceiveChannel,
    SendChannel,
    SendHandle,
)
from tandem.shared.handoff.carriers.kinds import CARRIERS, NAMES
from tandem.shared.handoff.carriers.option import AUTO
from tandem.shared.handoff.plane.messages import PeerJoined, ReceiveFailed
from tandem.shared.handoff.wire.frame import DeviceFrame, Message
from tandem.tests.shared.handoff.support.plane_pair import BLOCKS, END, PlaneRank, expect, hand_over

NAME = "datagrams"


class DatagramWriter:
    """Offers the address of a socket that the peer connects to."""

    slots = MAX_SLOTS
    needs_polling = False

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(1)
        self._listener.settimeout(5)
        self._peer: socket.socket | None = None
        self.loans = Loans()
        self.offer = os.fsencode(path)

    def start(self) -> None:
        self._peer, _ = self._listener.accept()  # the peer connected before it chose

    def descriptors(self) -> list[int]:
        return []

    def write(self, message: Message, offset: int | None) -> SendHandle:
        assert self._peer is not None and not isinstance(message, DeviceFrame)
        self._peer.send(message)
        return Loan(done=True)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        for each in (self._peer, self._listener):
            if each is not None:
                each.close()
        self._folder.cleanup()


class DatagramReader:
    needs_polling = False

    def __init__(self, offer: bytes, limit: int) -> None:
        self._limit = limit
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(os.fsdecode(offer))
        except OSError as error:
            self._socket.close()
            raise CarrierUnavailableError(f"cannot connect: {error}") from None
        self._socket.setblocking(False)

    def descriptors(self) -> list[Any]:
        return [self._socket]

    def read(self, now: float) -> memoryview | None:
        try:
            return memoryview(self._socket.recv(self._limit)) or None
        except BlockingIOError:
            return None

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._socket.close()


class DatagramCarrier(Carrier):
    name = NAME
    one_host = True

    def __init__(self, rank: RankResources) -> None:
        super().__init__(rank)
        self._limit = rank.max_frame_bytes

    def writer(self, channel: SendChannel, hello: bytes) -> FrameWriter:
        return DatagramWriter()

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        return DatagramReader(offer, self._limit)


class UnreachableCarrier(DatagramCarrier):
    """A carrier of the same name that reaches no peer."""

    def reader(self, channel: ReceiveChannel, offer: bytes) -> FrameReader:
        return DatagramReader(b"/nowhere", self._limit)


class UnavailableCarrier(DatagramCarrier):
    def __init__(self, rank: RankResources) -> None:
        raise CarrierUnavailableError("there are no datagrams")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ranks(
    stack: ExitStack, here: type[Carrier] = DatagramCarrier, carrier: str = "auto"
) -> tuple[PlaneRank, PlaneRank]:
    prefill = PlaneRank("p", seed=1, carriers=(DatagramCarrier, *CARRIERS), carrier="auto")
    decode = PlaneRank("d", listen_host=None, carriers=(here, *CARRIERS), carrier=carrier)
    return stack.enter_context(prefill), stack.enter_context(decode)


def test_the_option_offers_every_kind() -> None:
    (choices,) = (f.metadata["choices"] for f in fields(HandoffConfig) if f.name == "carrier")
    assert set(choices) == {AUTO, *NAMES}


def test_kv_moves_by_a_carrier_that_the_tests_bring(stack: ExitStack) -> None:
    prefill, decode = ranks(stack)
    for number in range(2):
        hand_over(prefill, decode, number)
    for rank in (prefill, decode):
        event = rank.log.wait(PeerJoined)
        assert (event.carrier, event.note) == (NAME, "")
        assert rank.plane.stats().peers == {NAME: 1}


def test_where_it_does_not_work_the_next_best_is_used(stack: ExitStack) -> None:
    prefill, decode = ranks(stack, UnreachableCarrier)
    hand_over(prefill, decode)
    event = decode.log.wait(PeerJoined)
    assert event.carrier == "shared_memory" and "cannot connect" in event.note
    assert prefill.log.wait(PeerJoined).carrier == "shared_memory"


def test_by_name_alone_a_peer_that_cannot_be_reached_is_refused(stack: ExitStack) -> None:
    prefill, decode = ranks(stack, UnreachableCarrier, NAME)
    decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
    failure = decode.log.wait(ReceiveFailed, 1)
    assert f"carrier: {NAME} only, and cannot connect" in failure.reason and not failure.retriable


def test_a_rank_that_does_not_know_it_is_not_offered_it(stack: ExitStack) -> None:
    prefill = stack.enter_context(PlaneRank("p", seed=1, carriers=(DatagramCarrier, *CARRIERS)))
    decode = stack.enter_context(PlaneRank("d", listen_host=None))
    hand_over(prefill, decode)
    assert decode.log.wait(PeerJoined).carrier == "shared_memory"


def test_a_rank_without_the_carrier_uses_another_unless_it_is_required(stack: ExitStack) -> None:
    prefill, decode = ranks(stack, UnavailableCarrier)
    hand_over(prefill, decode)
    assert decode.log.wait(PeerJoined).carrier == "shared_memory"
    forced = PlaneRank("e", listen_host=None, carriers=(UnavailableCarrier,), carrier=NAME)
    with pytest.raises(StartupError, match=f"--carrier {NAME} is not possible here: there are no"):
        forced.plane.start()
