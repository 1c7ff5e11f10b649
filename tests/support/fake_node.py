"""A node without a model: real engine core and inbox over fake ranks, which a test controls."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tandem.shared.engine.core import EngineCore
from tandem.shared.engine.executor import MultiprocessExecutor
from tandem.shared.engine.messages import KVSending
from tandem.shared.engine.plan import StepPlan, StepResult, TokenMasks
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.scheduling.steps_in_flight import MAX_STEPS
from tandem.shared.engine.start import NodeEngine, NodeIdentity
from tandem.shared.engine.structured.compiler import GrammarCompiler, load_backend
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
)
from tandem.shared.kv.block_pool import BlockPool
from tandem.shared.kv.planning import ResolvedEngine
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec
from tandem.shared.node.metrics import NodeMetrics
from tandem.tests.support.step_rows import rows_of
from tandem.tests.support.waiting import until

RANKS, BLOCK, VOCAB = 2, 16, 512
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=8)
LAYER = LayerSpec(attention=ATTENTION, mlp=DenseSpec(intermediate=8))
# Every hidden state of the fake ranks.
HIDDEN = struct.pack("<32f", 3, 4, *[0] * 30)
LIMITS = ResolvedEngine(
    num_blocks=64,
    block_size=BLOCK,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    prefix_cache_max_blocks=None,
)


def spec_of(layers: tuple[LayerSpec, ...]) -> DecoderSpec:
    """A model of these layers."""
    return DecoderSpec(
        vocab_size=VOCAB,
        hidden_size=32,
        layers=layers,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_position=LIMITS.max_model_len,
    )


class FakeRanks:
    """All ranks of a node. They run steps, and complete commands for the data plane at once."""

    def __init__(self) -> None:
        self.computes = asyncio.Event()  # while it is clear, no step ends
        self.computes.set()
        self.says: int | None = None  # the token of every row that samples
        self.fails = ""  # the reason with which each sequence of the next steps fails
        self.greets = True
        self.confirms = True  # confirms cancellations of what it receives
        self.excess = 0.0  # the difference that a comparison finds; 1 is allowed
        self.commands: list[tuple[int, Command]] = []
        self.masks: list[TokenMasks] = []
        self._plans: deque[StepPlan] = deque()
        self.came = asyncio.Condition()
        self.lost: list[str] = []
        self.inbox = Inbox(self._command, self.lost.append)

    def submit(self, plan: StepPlan, sending: list[KVSending]) -> None:
        self._plans.append(plan)

    def send_masks(self, masks: TokenMasks) -> None:
        self.masks.append(masks)

    async def result(self) -> StepResult:
        plan = self._plans.popleft()
        await asyncio.sleep(0)  # other tasks run during a step
        await self.computes.wait()
        rows = rows_of(plan) if self.fails else []
        sampled_rows = [row for row in rows_of(plan) if row.sample and self.says is not None]
        return StepResult(
            plan.step,
            {row.sequence_id: [self.says or 0] for row in sampled_rows},
            failed={row.sequence_id: self.fails for row in rows},
            hidden={
                row.sequence_id: HIDDEN[:4] if row.pool.classify else HIDDEN
                for row in rows_of(plan)
                if row.pool is not None and row.pool.hidden
            },
        )

    def emit(self, rank: int, event: Event) -> None:
        self.inbox.on_event(rank, event)

    def emit_all(self, kind: type[Any], of: Any, **fields: Any) -> None:
        """Emit the same event from every rank, for the transfer of the command ``of``."""
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

    def _command(self, rank: int, command: Command) -> None:
        self.commands.append((rank, command))
        asyncio.get_running_loop().create_task(self._reply(rank, command))

    async def _reply(self, rank: int, command: Command) -> None:
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
            self.emit(rank, Compared(**key, layer=2, component="V", largest=excess, limit=1.0))
        async with self.came:
            self.came.notify_all()


class FakeNode:
    """A node's parts, for the service or transfer under test: core, ranks, metrics and engine.

    ``engine`` is a real ``NodeEngine`` of a small grouped-query model; ``fields`` are those of it
    that differ.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        blocks: int = 64,
        layers: tuple[LayerSpec, ...] = (LAYER,) * 3,
        **fields: Any,
    ) -> None:
        self.ranks = FakeRanks()
        self.scheduler = Scheduler(
            BlockPool(blocks, BLOCK),
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
            max_num_seqs=LIMITS.max_num_seqs,
            max_model_len=LIMITS.max_model_len,
            max_waiting=8,
        )
        self.core = EngineCore(self.scheduler, self.ranks, max_steps=MAX_STEPS)
        self.metrics = NodeMetrics(self.core, self.ranks.inbox.stats, name)
        self.identity = NodeIdentity(name, epoch)
        self.engine = NodeEngine(
            core=self.core,
            ranks=cast(MultiprocessExecutor, self.ranks),
            spec=spec_of(layers),
            model_path=Path("model"),
            name="model",
            resolved=replace(LIMITS, num_blocks=blocks),
            fingerprint={"layers": "3"},
            weight_format="float32",
            kv_dtype="float32",
            endpoints=[("tcp://0.0.0.0:1", "tcp://0.0.0.0:2")] * RANKS,
            curve_keys=[],
            world_size=RANKS,
            grammars=GrammarCompiler(lambda: load_backend(None, VOCAB, ())),
        )
        self.engine = replace(self.engine, **fields)

    def held(self) -> int:
        counts = self.scheduler.pool.counts()
        self.scheduler.pool.check()
        return counts.owned + counts.reserved

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels, whatever their other labels."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeNode]:
        """Run the engine's loop. On leaving, the node must hold no blocks."""
        loop = asyncio.create_task(self.core.run())
        try:
            yield self
            await until(lambda: self.held() == 0)
            assert not self.ranks.lost
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
