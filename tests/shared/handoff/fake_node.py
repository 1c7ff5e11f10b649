"""A node without a model: the real engine core and inbox over ranks that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc

from tandem.shared.engine.core import EngineCore
from tandem.shared.engine.messages import KVStream
from tandem.shared.engine.plan import Sampled, StepPlan, StepResult
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.start import NodeIdentity
from tandem.shared.errors import PeerRefusedError
from tandem.shared.handoff.inbox import Inbox
from tandem.shared.handoff.plane.messages import (
    AdmitKeys,
    CancelExpect,
    Cancelled,
    CancelSend,
    Command,
    Compare,
    Compared,
    Event,
    Expect,
    Expecting,
    KeysAdmitted,
    from_wire,
    to_wire,
)
from tandem.shared.kv.block_pool import BlockPool
from tandem.shared.models.spec import AttentionSpec, DenseSpec, LayerSpec
from tandem.shared.node.metrics import NodeMetrics

RANKS, BLOCK, VOCAB = 2, 16, 512
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=8)
LAYER = LayerSpec(attention=ATTENTION, mlp=DenseSpec(intermediate=8))


def kv_heads(ranks: int) -> list[tuple[range, ...]]:
    """Four heads in each of three layers, divided among so many ranks."""
    if ranks not in (1, 2, 4):
        raise PeerRefusedError(f"a peer with {ranks} ranks")
    return [(range(rank * 4 // ranks, (rank + 1) * 4 // ranks),) * 3 for rank in range(ranks)]


class Ranks:
    """All ranks of a node: they run steps, and answer the data plane's commands at once."""

    def __init__(self) -> None:
        self.computes = asyncio.Event()  # clear it, and a step takes for ever
        self.computes.set()
        self.says: int | None = None  # the token of every row that samples
        self.fails = ""  # what each sequence of the next steps ends with
        self.greets = True
        self.confirms = True  # that what was cancelled is touched no more
        self.excess = 0.0  # what a comparison finds, where 1 is allowed
        self.commands: list[tuple[int, Command]] = []
        self.came = asyncio.Condition()
        self.lost: list[str] = []
        self.inbox = Inbox(self._command, self.lost.append)

    async def step(self, plan: StepPlan, streams: list[KVStream]) -> StepResult:
        await asyncio.sleep(0)  # a step takes time, in which others go on
        await self.computes.wait()
        rows = plan.sequences if self.fails else []
        drawn = [row for row in plan.sequences if row.sample and self.says is not None]
        return StepResult(
            plan.step,
            [Sampled(row.sequence_id, [self.says or 0]) for row in drawn],
            failed={row.sequence_id: self.fails for row in rows},
        )

    def emit(self, rank: int, event: Event) -> None:
        self.inbox.on_event(rank, to_wire(event))

    def emit_all(self, kind: type[Any], of: Any, **fields: Any) -> None:
        """The same event from every rank, about the transfer of a command."""
        for rank in range(RANKS):
            key = {"transfer_id": of.transfer_id, "attempt": of.attempt, "peer_rank": rank}
            self.emit(rank, kind(**key, **fields))

    def of(self, kind: type[Any]) -> list[Any]:
        return [command for _, command in self.commands if isinstance(command, kind)]

    async def wait(self, kind: type[Any], count: int = RANKS) -> Any:
        """The last of ``count`` commands of a kind, when they have come."""
        async with asyncio.timeout(10), self.came:
            await self.came.wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    def _command(self, rank: int, data: bytes) -> None:
        command = from_wire(data)
        assert isinstance(command, Command)
        self.commands.append((rank, command))
        asyncio.get_running_loop().create_task(self._answer(rank, command))

    async def _answer(self, rank: int, command: Command) -> None:
        key = {name: getattr(command, name, 0) for name in ("transfer_id", "attempt")}
        if isinstance(command, Expect) and self.greets:
            self.emit(rank, Expecting(**key, peer_rank=command.peer_rank))
        elif isinstance(command, AdmitKeys):
            self.emit(rank, KeysAdmitted(version=command.version))
        elif isinstance(command, CancelSend):
            self.emit(rank, Cancelled(**key, side="send"))
        elif isinstance(command, CancelExpect) and self.confirms:
            self.emit(rank, Cancelled(**key, side="receive"))
        elif isinstance(command, Compare):
            excess = self.excess if rank else 0.0
            self.emit(rank, Compared(**key, layer=2, component="V", largest=excess, allowed=1.0))
        async with self.came:
            self.came.notify_all()


class Node:
    """What a service or a transfer is given to work with."""

    def __init__(self, name: str, epoch: int, blocks: int = 64) -> None:
        self.ranks = Ranks()
        self.scheduler = Scheduler(
            BlockPool(blocks, BLOCK),
            max_num_batched_tokens=64,
            max_num_seqs=8,
            max_model_len=512,
            max_waiting=8,
        )
        self.core = EngineCore(self.scheduler, self.ranks)
        self.metrics = NodeMetrics(self.core, self.ranks.inbox.stats, name)
        self.identity = NodeIdentity(name, epoch)
        self.engine: Any = SimpleNamespace(
            core=self.core,
            world_size=RANKS,
            spec=SimpleNamespace(vocab_size=VOCAB, layers=[LAYER] * 3),
            resolved=SimpleNamespace(block_size=BLOCK),
            fingerprint={"layers": "3"},
            weight_dtype="float32",
            kv_dtype="float32",
            kv_heads=kv_heads,
            curve_keys=[],
            endpoints=[("tcp://0.0.0.0:1", "tcp://0.0.0.0:2")] * RANKS,
        )

    def held(self) -> int:
        counts = self.scheduler.pool.counts()
        self.scheduler.pool.check()
        return counts.owned + counts.reserved

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels, whatever others they have."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        """The engine's loop runs; on leaving, nothing may be held."""
        loop = asyncio.create_task(self.core.run())
        try:
            yield self
            await until(lambda: self.held() == 0)
            assert not self.ranks.lost
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)


@asynccontextmanager
async def served(add: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> AsyncIterator[str]:
    """The address of a gRPC server on loopback."""
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


async def until(condition: Callable[[], bool]) -> None:
    """For states that no event announces; fails at the deadline."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
