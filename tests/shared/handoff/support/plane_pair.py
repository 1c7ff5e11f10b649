"""Data planes over loopback with caches in memory, and logs of their events to wait on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tandem.shared.handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from tandem.shared.handoff.carriers.cuda_ipc.torch_device import Gpu
from tandem.shared.handoff.carriers.kinds import CARRIERS
from tandem.shared.handoff.carriers.ranks import Kinds
from tandem.shared.handoff.carriers.transport import Transport
from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.lease import new_epoch
from tandem.shared.handoff.plane.endpoint import ZEROMQ, DataPlane
from tandem.shared.handoff.plane.messages import (
    Event,
    Expect,
    Expecting,
    OpenSend,
    PlaneFailed,
    Received,
    SendFinished,
)
from tandem.shared.handoff.plane.settings import DataPlaneConfig
from tandem.shared.handoff.wire.head_parts import HeadRun
from tandem.tests.shared.handoff.support.fake_driver import FakeDevice
from tandem.tests.shared.handoff.support.memory_cache import MemoryCache, layer_of
from tandem.tests.support.layers_ready import layer_ready

E = TypeVar("E", bound=Event)
WAIT_SECONDS = 10.0
LAYERS, HEADS, HEAD_BYTES, BLOCK = 3, 2, 16, 8
CELL = 2 * HEADS * HEAD_BYTES
# A transfer that ends within a block.
END = 100
BLOCKS = tuple(range(13))
# So long that no peer is lost by its silence on a busy machine; tests of silence take another.
PATIENT = Timing(ping_seconds=60, silence_seconds=60)


def every_layer(heads: range) -> tuple[HeadRun, ...]:
    """The same heads of each layer."""
    return (HeadRun(LAYERS, heads.start, heads.stop),)


def make_cache(
    *,
    blocks: int = 64,
    seed: int | None = None,
    heads: range = range(HEADS),
    head_bytes: int = HEAD_BYTES,
    dtype: str = "bfloat16",
) -> MemoryCache:
    layout = [layer_of(heads, head_bytes, dtype)] * LAYERS
    cache = MemoryCache(layout, num_blocks=blocks, block_size=BLOCK, kv_dtype=dtype)
    if seed is not None:
        source = random.Random(seed)
        for layer in cache.layers:
            layer[:] = source.randbytes(len(layer))
    return cache


class PlaneEvents:
    """Collects events; ``wait`` returns the first one that fits, or fails the test."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(
        self, kind: type[E], transfer_id: int | None = None, *, seconds: float = WAIT_SECONDS
    ) -> E:
        def match() -> E | None:
            for event in self.events:
                id_matches = (
                    transfer_id is None or getattr(event, "transfer_id", None) == transfer_id
                )
                if isinstance(event, kind) and id_matches:
                    return event
            return None

        with self._changed:
            assert self._changed.wait_for(match, seconds), (kind, transfer_id, self.events)
            event = match()
        assert event is not None
        return event

    def of(self, kind: type[E]) -> list[E]:
        with self._changed:
            return [event for event in self.events if isinstance(event, kind)]


class PlaneRank:
    """One data plane with its cache and its log. ``carrier`` is the default, which the fixture
    ``each_carrier`` sets. A rank that names CUDA IPC gets a fake device, unless it has one.
    """

    carrier = "auto"

    def __init__(
        self,
        name: str,
        *,
        cache: MemoryCache | None = None,
        seed: int | None = None,
        epoch: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport = ZEROMQ,
        carriers: Kinds = CARRIERS,
        device: Gpu | None = None,
        **config: Any,
    ) -> None:
        self.cache = cache or make_cache(seed=seed)
        self.log = PlaneEvents()
        config.setdefault("slot_bytes", 2048)
        config.setdefault("staging_slots", 8)
        config.setdefault("timing", PATIENT)
        config.setdefault("carrier", PlaneRank.carrier)
        config.setdefault("device_slot_bytes", config["slot_bytes"])
        self.config = DataPlaneConfig(node_id=name, epoch=epoch or new_epoch(), **config)
        if device is None and CUDA_IPC in self.config.carrier:
            device = FakeDevice()
        self.device = device
        self.plane = DataPlane(
            self.config,
            self.cache,
            self.log,
            clock=clock,
            transport=transport,
            carriers=carriers,
            device=device,
        )

    def __enter__(self) -> PlaneRank:
        self.plane.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.stop()
        assert not self.log.of(PlaneFailed)
        self.check_books()

    def check_books(self) -> None:
        """A closed plane holds nothing, and every byte is accounted for."""
        stats = self.plane.stats()
        assert stats.free_slots == stats.total_slots
        assert stats.active_sends == stats.active_receives == stats.credit_in_flight == 0
        assert stats.bytes_sent == stats.bytes_acknowledged + stats.bytes_written_off
        if isinstance(self.device, FakeDevice):
            self.device.driver.check_books()

    def expect(
        self, sender: PlaneRank | Any, transfer_id: int, blocks: Iterable[int], **fields: Any
    ) -> None:
        """Reserve on this rank and wait until the sender has been greeted."""
        self.plane.submit(expect(sender, transfer_id, blocks, **fields))
        part = transfer_id, sender.config.rank
        until(lambda: part in [(e.transfer_id, e.peer_rank) for e in self.log.of(Expecting)])

    def open(
        self, receiver: PlaneRank | Any, transfer_id: int, blocks: Iterable[int], **fields: Any
    ) -> None:
        fields.setdefault("attempt", 1)
        fields.setdefault("heads", every_layer(range(HEADS)))
        fields.setdefault("dtype", "bfloat16")
        self.plane.submit(
            OpenSend(
                transfer_id=transfer_id,
                peer_node=receiver.config.node_id,
                peer_epoch=receiver.config.epoch,
                peer_rank=receiver.config.rank,
                block_table=tuple(blocks),
                **fields,
            )
        )

    def compute(
        self, transfer_id: int, first: int, end: int, *, chunk: int, attempt: int = 1
    ) -> None:
        """Announce layers chunk by chunk, as a prefill does."""
        for start in range(first, end, chunk):
            for layer in range(LAYERS):
                layer_ready(self.plane, transfer_id, attempt, layer, start, min(end, start + chunk))


def expect(
    sender: PlaneRank | Any, transfer_id: int, blocks: Iterable[int], **fields: Any
) -> Expect:
    fields.setdefault("attempt", 1)
    fields.setdefault("heads", every_layer(range(HEADS)))
    fields.setdefault("peer_epoch", sender.config.epoch)
    fields.pop("progress_seconds", None)  # only a sender has such a limit
    return Expect(
        transfer_id=transfer_id,
        peer_node=sender.config.node_id,
        peer_rank=sender.config.rank,
        bulk=sender.plane.endpoints.bulk,
        control=sender.plane.endpoints.control,
        key=sender.plane.endpoints.key,
        block_table=tuple(blocks),
        **fields,
    )


def rows(cache: MemoryCache, blocks: Iterable[int], first: int, end: int) -> list[bytes]:
    """The raw rows of a token range in every layer, for comparing caches."""
    table = tuple(blocks)
    return [
        bytes(cache.layers[layer][cache.row(table, token, layer)])
        for layer in range(len(cache.layers))
        for token in range(first, end)
    ]


def hand_over(prefill: PlaneRank, decode: PlaneRank, number: int = 1) -> None:
    """One whole transfer between two running ranks, to its last byte."""
    decode.expect(prefill, number, BLOCKS, first_token=0, end_token=END)
    prefill.open(decode, number, BLOCKS, first_token=0, end_token=END)
    prefill.compute(number, 0, END, chunk=33)
    prefill.log.wait(SendFinished, number)
    decode.log.wait(Received, number)
    assert rows(decode.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Poll something that has no event of its own; fails at the deadline."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        threading.Event().wait(0.002)
