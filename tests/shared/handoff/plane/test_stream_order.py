"""The order of a hand-over on GPUs: real planes and caches over fake streams, whose work is only
over for those who have waited for it. Every access to blocks, rings and pinned memory is checked.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tandem.kernels.reference.cache import IndexedFrames
from tandem.kernels.row_sums import keys, row_sums
from tandem.kernels.signatures import FrameCells
from tandem.shared.causes import Cause
from tandem.shared.handoff.carriers.zeromq.sockets import Timing
from tandem.shared.handoff.plane import computed_layers, loop, receiver
from tandem.shared.handoff.plane.computed_layers import ComputedLayers
from tandem.shared.handoff.plane.messages import (
    CancelSend,
    LayerReady,
    Received,
    ReceiveFailed,
    SendFailed,
    SendFinished,
)
from tandem.shared.handoff.wire import frame
from tandem.shared.handoff.wire.frame import DeviceFrame, Message
from tandem.shared.handoff.wire.head_parts import HeadRun
from tandem.shared.kv.cache import KVCache
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec
from tandem.tests.shared.handoff.support.by_hand import HandRank, World
from tandem.tests.shared.handoff.support.fake_driver import FakeDevice, FakeDriver
from tandem.tests.shared.handoff.support.plane_pair import expect
from tandem.tests.support.stream_order import OrderedWait, StreamOrder, memory_of, spans_of

HEADS, DIM, LAYERS, BLOCK, BLOCKS, END = 2, 32, 2, 4, 24, 42
# A layer's keys and values are alike, so that frames of several layers are copied at once.
LAYER = LayerSpec(
    attention=AttentionSpec(num_heads=4, num_kv_heads=HEADS, head_dim=DIM),
    mlp=DenseSpec(intermediate=8),
)
SPEC = DecoderSpec(
    vocab_size=10,
    hidden_size=8,
    layers=(LAYER,) * LAYERS,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_position=1000,
)
HERE = tuple((7 * i) % BLOCKS for i in range(11))
THERE = tuple((5 * i + 1) % BLOCKS for i in range(11))
PACKED, COMPUTED = "packed-frames", "computed-layers"


class HandWaits:
    """``DeviceWaits`` that the test ends one by one; those in ``careless`` without waiting."""

    all: dict[str, HandWaits]
    careless: set[str]

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: deque[tuple[OrderedWait, Callable[[Exception | None], None]]] = deque()
        self.all.setdefault(name, self)

    def put(self, wait: OrderedWait, then: Callable[[Exception | None], None]) -> None:
        self.waits.append((wait, then))

    def step(self) -> None:
        if self.waits:
            wait, then = self.waits.popleft()
            if self.name in self.careless:
                wait.skip()
            else:
                wait()
            then(None)

    def close(self) -> None:
        while self.waits:
            self.step()


class SummedFrames(IndexedFrames):
    """Sums on the way, as the kernel."""

    sums = True

    def pack(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor:
        super().pack(cells, frame)
        return row_sums(frame)

    def scatter(self, cells: FrameCells, frame: torch.Tensor) -> torch.Tensor:
        super().scatter(cells, frame)
        return row_sums(frame)


class WatchedDriver(FakeDriver):
    """Copies in the current stream. Memory that was opened is that of its owner."""

    owners: list[WatchedDriver]

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order
        self.spoil = False
        self.owners.append(self)

    def copy(self, into: int, source: int, length: int) -> None:
        super().copy(into, source, length)
        if self.spoil:
            ctypes.memset(into + length - 1, 0x5A, 1)
        reads = [(self._at_owner(source), length)]
        self._order.launch("cuMemcpyDtoDAsync", reads=reads, writes=[(into, length)])

    def settle(self) -> None:
        super().settle()
        self._order.mark()()

    def _at_owner(self, address: int) -> int:
        start, opened = next(
            (start, mapped)
            for start, mapped in self.opened.items()
            if start <= address < start + mapped.size
        )
        owned = (each for driver in self.owners for each in driver.owned.values())
        mapped = next(each for each in owned if each.number == opened.number)
        return mapped.address + address - start


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamOrder]:
    keys(torch.device("cpu"))
    order = StreamOrder()
    checksum_of, numpy = frame.checksum_of, torch.Tensor.numpy

    def watched_checksum(message: Message) -> int:
        if not isinstance(message, DeviceFrame):
            order.host("checksum", reads=[memory_of(message)])
        return checksum_of(message)

    def watched_numpy(x: torch.Tensor) -> Any:
        order.host("numpy", reads=spans_of(x))
        return numpy(x)

    monkeypatch.setattr(frame, "checksum_of", watched_checksum)
    monkeypatch.setattr(torch.Tensor, "numpy", watched_numpy)
    monkeypatch.setattr(HandWaits, "all", {}, raising=False)
    monkeypatch.setattr(HandWaits, "careless", set(), raising=False)
    monkeypatch.setattr(WatchedDriver, "owners", [], raising=False)
    for module in (loop, computed_layers):
        monkeypatch.setattr(module, "DeviceWaits", HandWaits)
    with order:
        yield order


class Pair:
    """A prefill rank and a decode rank, each with a stream that computes and one that copies."""

    def __init__(self, world: World, order: StreamOrder) -> None:
        self.world, self.order = world, order
        self.prefill, self.decode = (self._rank(name) for name in "pd")
        for rank in (self.prefill, self.decode):
            turn = rank.turn
            rank.turn = self._in(f"copies {rank.config.node_id}", turn)  # type: ignore[method-assign]
        self.computed = ComputedLayers(order.mark, self.prefill.plane.submit, LAYERS)

    def _rank(self, name: str) -> HandRank:
        cache = KVCache(SPEC, num_blocks=BLOCKS, block_size=BLOCK, dtype=torch.bfloat16)
        cache.mark = self.order.mark
        cache._frames = SummedFrames(cache.layers, BLOCK)
        device = FakeDevice(WatchedDriver(self.order))
        # A busy machine may delay a turn by seconds.
        timing = Timing(ping_seconds=0.2, silence_seconds=60.0)
        return self.world.rank(name, cache=cache, device=device, timing=timing)

    def _in(self, stream: str, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with self.order.running("host", stream):
                work()

        return run

    def compute(self, rank: HandRank, layer: int, table: tuple[int, ...]) -> None:
        """Write a layer of a sequence."""
        slots = torch.tensor([table[t // BLOCK] * BLOCK + t % BLOCK for t in range(END)])
        with self.order.running("host", f"compute {rank.config.node_id}"):
            for component in rank.cache.layers[layer]:
                component[:, slots] = torch.randn(HEADS, END, DIM).bfloat16()  # type: ignore[index]

    def attend(self, rank: HandRank, layer: int, table: tuple[int, ...]) -> torch.Tensor:
        """Read a layer of a sequence."""
        slots = torch.tensor([table[t // BLOCK] * BLOCK + t % BLOCK for t in range(END)])
        with self.order.running("host", f"compute {rank.config.node_id}"):
            return torch.stack([each[:, slots] for each in rank.cache.layers[layer]])  # type: ignore[index]

    def open(self) -> None:
        heads = (HeadRun(LAYERS, 0, HEADS),)
        span = {"heads": heads, "first_token": 0, "end_token": END}
        self.decode.plane.submit(expect(self.prefill, 1, THERE, **span))
        self.prefill.open(self.decode, 1, HERE, dtype="bfloat16", **span)

    def announce(self, layer: int) -> None:
        with self.order.running("host", "compute p"):
            self.computed.announce(
                [
                    LayerReady(
                        transfer_id=1,
                        attempt=1,
                        first_layer=layer,
                        end_layer=layer + 1,
                        first_token=0,
                        end_token=END,
                    )
                ]
            )

    def until(self, *ended: tuple[HandRank, type]) -> None:
        def turn() -> None:
            self.world.turn(2)
            for waits in list(HandWaits.all.values()):
                waits.step()

        with self.order.running("host"):
            self.world.until(lambda: all(r.log.of(kind) for r, kind in ended), turn)

    def until_packed(self) -> None:
        def turn() -> None:
            self.world.turn()
            HandWaits.all[PACKED].step()

        self.world.until(lambda: not self.prefill.loop._sender.is_packing, turn)

    def hand_over(self) -> None:
        """A whole transfer, whose blocks both sides then use for something else."""
        self.open()
        for layer in range(LAYERS):
            self.compute(self.prefill, layer, HERE)
            self.announce(layer)
        self.until((self.prefill, SendFinished), (self.decode, Received))
        for layer in range(LAYERS):
            sent, arrived = (
                self.attend(rank, layer, table)
                for rank, table in ((self.prefill, HERE), (self.decode, THERE))
            )
            with self.order.running("host", "test"):
                for stream in ("compute p", "compute d"):
                    self.order.wait_stream(stream)
                assert torch.equal(sent, arrived)
            self.compute(self.prefill, layer, HERE)


def run(carrier: str, order: StreamOrder) -> list[str]:
    with World(carrier) as world:
        pair = Pair(world, order)
        pair.hand_over()
        assert pair.decode.plane.stats().peers == {carrier: 1}
    return order.races


@pytest.mark.parametrize("carrier", ["tcp", "shared_memory", "cuda_ipc"])
def test_every_access_of_a_hand_over_is_ordered(carrier: str, order: StreamOrder) -> None:
    assert run(carrier, order) == []


@pytest.mark.parametrize("carrier", ["tcp", "cuda_ipc"])
def test_a_cancelled_transfer_leaves_no_slot_in_use(carrier: str, order: StreamOrder) -> None:
    with World(carrier) as world:
        pair = Pair(world, order)
        pair.open()
        for layer in range(LAYERS):
            pair.compute(pair.prefill, layer, HERE)
            pair.announce(layer)
        with order.running("host"):
            # Frames are packed while earlier ones are.
            packing = pair.prefill.loop._sender._packing
            world.until(lambda: len(packing) > 1, lambda: _turn(pair))
            pair.prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
            # However late the cancellation comes back, the frames are still being packed.
            world.until(lambda: bool(pair.decode.log.of(ReceiveFailed)), lambda: world.turn(2))
            assert pair.prefill.plane.stats().free_slots < pair.prefill.plane.stats().total_slots
            pair.until_packed()
        for layer in range(LAYERS):
            pair.compute(pair.decode, layer, THERE)
    # The frames that were being packed are not sent; books are checked at the end of the world.
    assert [race for race in order.races if "compute d" in race] == []


def _turn(pair: Pair) -> None:
    pair.world.turn()
    HandWaits.all[COMPUTED].step()


def test_a_frame_that_is_found_corrupt_when_it_is_scattered_ends_the_attempt(
    order: StreamOrder,
) -> None:
    with World("cuda_ipc") as world:
        pair = Pair(world, order)
        assert pair.decode.device is not None
        pair.decode.device.driver.spoil = True  # type: ignore[attr-defined]
        pair.open()
        for layer in range(LAYERS):
            pair.compute(pair.prefill, layer, HERE)
            pair.announce(layer)
        pair.until((pair.decode, ReceiveFailed), (pair.prefill, SendFailed))
        (failed,) = pair.decode.log.of(ReceiveFailed)
        assert failed.cause == Cause.CHECKSUM.value and "checksum" in failed.reason
        assert pair.decode.plane.stats().checksum_failures == 1
        with order.running("host"):
            pair.until_packed()
    assert order.races == []


def test_a_gpu_that_fails_while_it_packs_ends_the_transfer_and_not_the_plane(
    order: StreamOrder,
) -> None:
    with World("cuda_ipc") as world:
        pair = Pair(world, order)
        pair.open()
        pair.compute(pair.prefill, 0, HERE)
        pair.announce(0)
        with order.running("host"):
            world.until(lambda: bool(HandWaits.all[PACKED].waits), lambda: _turn(pair))
        waits = HandWaits.all[PACKED].waits
        _, then = waits.popleft()
        then(RuntimeError("an illegal memory access"))
        pair.until((pair.prefill, SendFailed), (pair.decode, ReceiveFailed))
        assert (
            "packing failed: RuntimeError('an illegal" in pair.prefill.log.of(SendFailed)[0].reason
        )
        with order.running("host"):
            pair.until_packed()


@pytest.mark.parametrize("carrier", ["tcp", "cuda_ipc"])
def test_a_layer_that_is_packed_before_it_is_computed_is_found(
    carrier: str, order: StreamOrder
) -> None:
    HandWaits.careless.add(COMPUTED)
    assert any("copies p: aten::index reads" in race for race in run(carrier, order))


@pytest.mark.parametrize(
    ("carrier", "race"), [("tcp", "host: checksum reads"), ("cuda_ipc", "host: numpy reads")]
)
def test_a_frame_that_is_sent_before_it_is_packed_is_found(
    carrier: str, race: str, order: StreamOrder
) -> None:
    HandWaits.careless.add(PACKED)
    assert any(race in each for each in run(carrier, order))


def test_blocks_that_are_used_before_they_are_written_are_found(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver.Incoming, "settle", lambda transfer: None)
    assert any("compute d: aten::index reads" in race for race in run("tcp", order))


def test_sums_that_are_read_before_they_are_there_are_found(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = receiver._verify_copied

    def hurried(message: Any, copying: Any) -> int:
        wait, copying.wait = copying.wait, lambda: None
        try:
            return verify(message, copying)
        finally:
            copying.wait = wait

    monkeypatch.setattr(receiver, "_verify_copied", hurried)
    assert any("host: numpy reads" in race for race in run("cuda_ipc", order))


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_that_is_written_while_a_copy_reads_it_is_found(
    order: StreamOrder, waits: bool
) -> None:
    pinned, there = torch.zeros(99), torch.empty(99)
    with order.running("host", "compute"):
        there.copy_(pinned, non_blocking=True)
        over = order.mark()
    with order.running("host", "other"):
        order.wait_stream("compute")
        there += 1
    if waits:
        over()
    order.host("next step", writes=spans_of(pinned))
    race = "host: next step writes what compute: aten::copy_ reads"
    assert order.races == [] if waits else race in order.races
