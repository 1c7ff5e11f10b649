"""Peers that greet like real ones and are then driven by the test."""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import zmq

from tandem.shared.handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from tandem.shared.handoff.carriers.cuda_ipc import carrier as cuda_ipc
from tandem.shared.handoff.carriers.cuda_ipc.device_ring import DevicePlace
from tandem.shared.handoff.carriers.doorbells import (
    DoorbellReader,
    DoorbellWriter,
    doorbell,
    payload_doorbell,
    read_doorbell,
)
from tandem.shared.handoff.carriers.shared_memory import NAME as SHARED_MEMORY
from tandem.shared.handoff.carriers.shared_memory import carrier as shared_memory
from tandem.shared.handoff.carriers.shared_memory.ring import MappedRing, SharedRing
from tandem.shared.handoff.carriers.tcp import NAME as TCP
from tandem.shared.handoff.carriers.zeromq import password
from tandem.shared.handoff.carriers.zeromq.curve import ZapHandler
from tandem.shared.handoff.plane.loop import greeting_of
from tandem.shared.handoff.plane.messages import Expecting
from tandem.shared.handoff.wire import frame, greeting
from tandem.shared.handoff.wire.frame import Header, Kind
from tandem.shared.handoff.wire.greeting import Greeting
from tandem.tests.shared.handoff.support.plane_pair import CELL, HEADS, PlaneRank, expect, until

WAIT_MS = 10_000


class FakeSender:
    """A prefill rank that a test drives frame by frame. ``real`` lends it identity and cache."""

    def __init__(self, real: PlaneRank) -> None:
        self.config, self.cache = real.config, real.cache
        self.me = greeting_of(real.config, real.cache, {TCP: b""})
        self.context = zmq.Context()
        self.dialers = ZapHandler(self.context, locked=False, epoch=real.config.epoch)
        self.bulk, self.control = (self.context.socket(zmq.ROUTER) for _ in range(2))
        for socket in (self.bulk, self.control):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            password.guard(socket)
            socket.bind("tcp://127.0.0.1:0")
        self.bulk_id = self.control_id = b""
        self.peer_epoch = 0
        self.bells: DoorbellWriter | None = None

    @property
    def plane(self) -> FakeSender:
        return self

    @property
    def endpoints(self) -> FakeSender.Endpoints:
        return FakeSender.Endpoints(self.bulk, self.control)

    class Endpoints:
        def __init__(self, bulk: zmq.Socket, control: zmq.Socket) -> None:
            self.bulk = bulk.getsockopt_string(zmq.LAST_ENDPOINT)
            self.control = control.getsockopt_string(zmq.LAST_ENDPOINT)
            self.key = ""

    def __enter__(self) -> FakeSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
        if self.bells is not None:
            self.bells.close()

    def accept(
        self,
        ring: SharedRing | None = None,
        device_ring: DevicePlace | None = None,
        encode: Callable[[Greeting], bytes] = greeting.encode,
        **changes: Any,
    ) -> None:
        """Reply to one dialer's greeting, with fields changed; with a ring, in shared memory or a
        device's."""
        until(self._has_greeting)
        self.bulk_id, _ = self.bulk.recv_multipart()
        self.control_id, message = self.control.recv_multipart()
        self.hello = message
        theirs = greeting.decode(message)
        self.peer_epoch = theirs.epoch
        reply = replace(self.me, connection=theirs.connection)
        if ring is not None:
            self.bells = DoorbellWriter(theirs.connection)
            offer = shared_memory.encode_offer(ring.place, self.bells.descriptor)
            reply = replace(reply, offers={SHARED_MEMORY: offer, TCP: b""})
        if device_ring is not None:
            self.bells = DoorbellWriter(theirs.connection)
            offer = cuda_ipc.encode_offer(device_ring, os.getpid(), self.bells.descriptor)
            reply = replace(reply, offers={CUDA_IPC: offer})
        reply = replace(reply, **changes)
        self.control.send_multipart([self.control_id, encode(reply)])

    def _has_greeting(self) -> bool:
        """Let dialers in; true once one has greeted on both connections."""
        self.dialers.reply()
        return all(socket.poll(0) for socket in (self.bulk, self.control))

    def end(self, socket: str) -> None:
        """End the connections of ``bulk`` or ``control``."""
        self.dialers.close()  # libzmq ends a connection once its authenticator has let go of it
        getattr(self, socket).close(0)

    def expected_by(
        self, decode: PlaneRank, transfer_id: int, blocks: Iterable[int], **fields: Any
    ) -> None:
        decode.plane.submit(expect(self, transfer_id, blocks, **fields))
        self.accept()
        decode.log.wait(Expecting, transfer_id)

    def header(self, kind: Kind, transfer_id: int, **fields: Any) -> Header:
        fields.setdefault("attempt", 1)
        fields.setdefault("sender_epoch", self.config.epoch)
        fields.setdefault("receiver_epoch", self.peer_epoch)
        return Header(kind=kind, transfer_id=transfer_id, **fields)

    def data(
        self, transfer_id: int, sequence: int, layer: int, first: int, end: int, **fields: Any
    ) -> Any:
        """A valid data frame of one layer, with fields changed."""
        payload = bytes([layer + 1]) * ((end - first) * CELL)
        ranges = {
            "first_layer": layer,
            "end_layer": layer + 1,
            "first_token": first,
            "end_token": end,
            "first_head": 0,
            "end_head": HEADS,
        }
        return frame.encode(
            self.header(Kind.DATA, transfer_id, sequence=sequence, **(ranges | fields)), payload
        )

    def fin(self, transfer_id: int, messages: list[bytes], **changes: Any) -> bytes:
        digest = frame.Digest()
        for message in messages:
            digest.add(frame.verify(message))
        size = sum(len(message) - frame.HEADER_BYTES for message in messages)
        fin = replace(frame.Fin(len(messages), size, digest.value), **changes)
        header = self.header(Kind.FIN, transfer_id, sequence=len(messages))
        return frame.encode(header, frame.fin_payload(fin))

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self.bulk.send_multipart([self.bulk_id, message])

    def lend(self, offset: int, length: int) -> None:
        """Announce a frame in the ring."""
        assert self.bells is not None
        self.bells.ring(doorbell(offset, length))

    def tell(self, offset: int, length: int, head: bytes = bytes(frame.HEADER_BYTES)) -> None:
        """Announce a frame with this header in the device's ring."""
        assert self.bells is not None
        self.bells.ring(payload_doorbell(offset, length, memoryview(head)))

    def send_control(self, message: bytes) -> None:
        self.control.send_multipart([self.control_id, message])

    def pong(self) -> None:
        """Stay alive for the dialer."""
        header = Header(
            kind=Kind.PONG, sender_epoch=self.config.epoch, receiver_epoch=self.peer_epoch
        )
        self.send_control(frame.encode(header))

    def next(self, *kinds: Kind) -> tuple[Header, memoryview]:
        """The next control frame of these kinds; pings get a reply meanwhile."""
        return _next(self.control, kinds, self.pong)


class FakeReceiver:
    """A decode rank that greets, and then grants credit only on request of the test."""

    def __init__(
        self,
        real: PlaneRank,
        sender: PlaneRank,
        encode: Callable[[Greeting], bytes] = greeting.encode,
        **changes: Any,
    ) -> None:
        self.config = real.config
        self.epoch = real.config.epoch
        self.sender_epoch = sender.config.epoch
        self.context = zmq.Context()
        self.bulk, self.control = (self.context.socket(zmq.DEALER) for _ in range(2))
        hello = replace(
            greeting_of(real.config, real.cache, {TCP: b""}),
            connection=secrets.randbits(64),
            peer_epoch=self.sender_epoch,
        )
        hello = replace(hello, **changes)
        endpoints = sender.plane.endpoints
        for socket, at in ((self.bulk, endpoints.bulk), (self.control, endpoints.control)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            password.show(socket, self.sender_epoch)
            socket.connect(at)
            socket.send(encode(hello))
        self.reply = self.control.recv()
        self.welcome = greeting.decode(self.reply)
        self.bells: DoorbellReader | None = None
        self.ring: MappedRing | None = None

    def share(self) -> None:
        """Choose shared memory, as a dialer does that has mapped the ring."""
        place, bell = shared_memory.read_offer(self.welcome.offers[SHARED_MEMORY])
        self.ring = MappedRing(place)
        self.bells = DoorbellReader(place.pid, bell, self.welcome.connection)
        self.send(Kind.CHOICE, payload=b"shared_memory")

    def __enter__(self) -> FakeReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
        if self.bells is not None:
            self.bells.close()

    def heard(self) -> tuple[int, int]:
        """The place of the next frame in the ring."""
        assert self.bells is not None
        record = self.bells.next()
        if record is None:
            select.select([self.bells], [], [], WAIT_MS / 1000)
            record = self.bells.next()
        place = read_doorbell(record or b"")
        assert place is not None, record
        return place

    def send(self, kind: Kind, transfer_id: int = 0, payload: bytes = b"", **fields: Any) -> None:
        fields.setdefault("attempt", 1 if transfer_id else 0)
        fields.setdefault("sender_epoch", self.epoch)
        fields.setdefault("receiver_epoch", self.sender_epoch)
        header = Header(kind=kind, transfer_id=transfer_id, **fields)
        self.control.send(frame.encode(header, payload))

    def ping(self) -> None:
        self.send(Kind.PING)

    def take(self) -> tuple[Header, memoryview]:
        """The next bulk frame."""
        return frame.decode(self.bulk.recv(), 1 << 20)

    def next(self, *kinds: Kind) -> tuple[Header, memoryview]:
        return _next(self.control, kinds, self.ping)


def _next(
    socket: zmq.Socket, kinds: tuple[Kind, ...], keep_alive: Callable[[], None]
) -> tuple[Header, memoryview]:
    for _ in range(1000):
        parts = socket.recv_multipart()
        header, payload = frame.decode(parts[-1], 1024)
        if header.kind in kinds:
            return header, payload
        if header.kind is Kind.PING:
            keep_alive()
    raise AssertionError(f"no {kinds} among 1000 frames")
