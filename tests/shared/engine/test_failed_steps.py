"""Steps that fail on real ranks: they cost their sequences, not the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tandem.shared.engine import core, executor
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import FinishReason, Sequence, StepOutput
from tandem.shared.engine.start import NodeEngine, start_engine
from tandem.tests.shared.engine.test_executor import CONFIG, IDENTITY, SECONDS, run_instead

GOOD, POISON = 40, 41

# What happens to a rank that meets a step with the poison among its tokens: ``{kind}`` is raised,
# by the ranks of ``{ranks}``, before or after the model has run.
FAILING = """
import torch
from tandem.shared.engine.rank import process, runner
run = runner.ModelRunner._run

def poisoned(self, sequences, on_layer, result):
    poison = any({poison} in row.tokens for row in sequences) and self.tp.rank in {ranks}
    if poison and not {late}:
        raise {error}
    run(self, sequences, on_layer, result)
    if poison:
        raise {error}

runner.ModelRunner._run = poisoned
process.main()
"""

Output = asyncio.Queue[StepOutput]


@asynccontextmanager
async def failing(
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: str = "IndexError('no such block')",
    size: int = 1,
    ranks: tuple[int, ...] = (0, 1),
    late: bool = False,
    ahead: str = "on",
    lost: Callable[[str], None] = lambda reason: None,
) -> AsyncIterator[NodeEngine]:
    run_instead(monkeypatch, FAILING.format(poison=POISON, ranks=ranks, late=late, error=error))
    config = replace(CONFIG, tensor_parallel_size=size, async_scheduling=ahead)
    engine = await start_engine(config, IDENTITY, on_lost=lost)
    loop = asyncio.create_task(engine.core.run())
    try:
        yield engine
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await engine.ranks.stop()


async def ask(engine: NodeEngine, token: int, count: int = 6) -> Sequence:
    """A greedy sequence that has ended."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    one = Sequence(engine.core.new_id(), [token] * count, params)
    outputs: Output = asyncio.Queue()
    engine.core.submit(one, outputs.put_nowait)
    async with asyncio.timeout(SECONDS):
        while (await outputs.get()).finish_reason is None:
            pass
    return one


@pytest.mark.parametrize(
    ("error", "cause", "ahead"),
    [
        ("IndexError('no such block')", "computation", "on"),
        ("IndexError('no such block')", "computation", "off"),
        ("torch.OutOfMemoryError('CUDA out of memory')", "out_of_memory", "on"),
    ],
)
async def test_a_step_that_raises_ends_the_sequence_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, error: str, cause: str, ahead: str
) -> None:
    async with failing(monkeypatch, error=error, ahead=ahead) as engine:
        alone = await ask(engine, GOOD)
        bad, *good = await asyncio.gather(
            ask(engine, POISON), *(ask(engine, GOOD, 6 + n) for n in range(3))
        )
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.error.startswith(error.partition("(")[0].removeprefix("torch."))
        assert all(one.finish_reason is FinishReason.LENGTH for one in good)
        assert good[0].outputs == alone.outputs
        assert engine.core.counters.failed_steps[cause] >= 1
        assert engine.core.counters.failed_sequences == {cause: 1, "not_finite": 0}
        engine.core._scheduler.pool.check()
        assert engine.core._scheduler.pool.counts().owned == 0


@pytest.mark.parametrize(
    ("ranks", "late", "ahead"),
    [((0, 1), False, "on"), ((0,), True, "on"), ((0,), True, "off"), ((1,), True, "on")],
)
async def test_ranks_that_are_in_step_go_on_together(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], late: bool, ahead: str
) -> None:
    async with failing(monkeypatch, size=2, ranks=ranks, late=late, ahead=ahead) as engine:
        before = await ask(engine, GOOD)
        assert (await ask(engine, POISON)).finish_reason is FinishReason.ERROR
        assert (await ask(engine, GOOD, 7)).finish_reason is FinishReason.LENGTH
        assert (await ask(engine, GOOD)).outputs == before.outputs


@pytest.mark.parametrize("alone", [0, 1])
async def test_a_rank_that_leaves_the_others_in_a_collective_loses_the_node_soon(
    monkeypatch: pytest.MonkeyPatch, alone: int
) -> None:
    monkeypatch.setattr(executor, "AGREE_SECONDS", 0.2)
    lost: list[str] = []
    async with failing(monkeypatch, size=2, ranks=(alone,), lost=lost.append) as engine:
        bad = await ask(engine, POISON)
        assert bad.finish_reason is FinishReason.ERROR
        assert lost and "others hang in it: IndexError: no such block" in lost[0]


async def test_a_node_on_which_nothing_works_any_more_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "MAX_FAILED_IN_A_ROW", 3)
    lost: list[str] = []
    async with failing(monkeypatch, lost=lost.append) as engine:
        for _ in range(2):
            await ask(engine, POISON)
        await ask(engine, GOOD)
        for _ in range(2):
            await ask(engine, POISON)
        assert not lost
        await ask(engine, POISON)
        assert lost == ["3 sequences failed in a row: IndexError: no such block"]
