"""Steps that fail on real ranks: they cost their sequences, not the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from tandem.shared.engine import core, executor
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import FinishReason, Sequence, StepOutput
from tandem.shared.engine.start import NodeEngine, start_engine
from tandem.shared.engine.work import Generate
from tandem.tests.shared.engine.test_executor import CONFIG, IDENTITY, SECONDS, run_first

# Tests of one kind of node share it, so the event loop lasts as long as the nodes.
pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = 40
# Tokens that fail the steps which compute them. ``BROKEN`` and ``FULL`` do so on all ranks before
# the model has run, ``LATE`` on one rank after it has, ``ALONE`` on one rank before.
BROKEN, FULL = 41, 42
LATE = {0: 43, 1: 44}
ALONE = {0: 45, 1: 46}
FAILING = """
import torch
from tandem.shared.engine.rank import runner
run = runner.ModelRunner._run

def broken():
    return IndexError("no such block")

def full():
    return torch.OutOfMemoryError("CUDA out of memory")

# The error, the ranks that raise it, and True if the model runs before.
FAULTS = {
    41: (broken, (0, 1), False),
    42: (full, (0, 1), False),
    43: (broken, (0,), True),
    44: (broken, (1,), True),
    45: (broken, (0,), False),
    46: (broken, (1,), False),
}

def poisoned(self, plan, on_layer):
    met = [FAULTS[token] for token in plan.columns.tokens if token in FAULTS]
    mine = [(error, late) for error, ranks, late in met if self.tp.rank in ranks]
    for error, late in mine:
        if not late:
            raise error()
    outputs = run(self, plan, on_layer)
    for error, _ in mine:
        raise error()
    return outputs

runner.ModelRunner._run = poisoned

# Places that have no memory in a step with such a token.
from tandem.shared.engine.rank.sampler import Sampler
from tandem.shared.engine.rank.step_inputs import StepInputs
from tandem.shared.models.decoder import Decoder

PLACES = {
    51: (StepInputs, "batch"),
    52: (Decoder, "forward"),
    53: (Decoder, "logits"),
    54: (Sampler, "draw"),
    55: (runner.ModelRunner, "collect"),
    56: (runner.ModelRunner, "_update_slots"),
}
launch, met = runner.ModelRunner.launch, set()

def launched(self, plan, on_layer=None):
    met.clear()
    met.update(plan.columns.tokens)
    return launch(self, plan, on_layer)

def full_at(token, owner, name):
    function = getattr(owner, name)

    def run_out(*arguments, **others):
        if token in met:
            raise full()
        return function(*arguments, **others)

    setattr(owner, name, run_out)

for token, (owner, name) in PLACES.items():
    full_at(token, owner, name)
runner.ModelRunner.launch = launched
"""
FULL_PLACES = range(51, 57)

Output = asyncio.Queue[StepOutput]


@dataclass(frozen=True)
class FailingNode:
    """A node and the reasons for which it was lost."""

    engine: NodeEngine
    lost: list[str]


@asynccontextmanager
async def running(size: int, ahead: str) -> AsyncIterator[FailingNode]:
    lost: list[str] = []
    config = replace(CONFIG, tensor_parallel_size=size, async_scheduling=ahead)
    with pytest.MonkeyPatch.context() as patch:
        run_first(patch, FAILING)
        engine = await start_engine(config, IDENTITY, on_lost=lost.append)
    loop = asyncio.create_task(engine.core.run())
    try:
        yield FailingNode(engine, lost)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await engine.ranks.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["on", "off"])
async def alone(request: pytest.FixtureRequest) -> AsyncIterator[FailingNode]:
    """A node of one rank, which plans steps ahead or in turn."""
    async with running(1, request.param) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["on", "off"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[FailingNode]:
    """A node of two ranks."""
    async with running(2, request.param) as node:
        yield node


async def ask(engine: NodeEngine, token: int, count: int = 6) -> Sequence:
    """A greedy sequence that has ended."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    one = Sequence(engine.core.new_id(), [token] * count, Generate(params))
    outputs: Output = asyncio.Queue()
    engine.core.submit(one, outputs.put_nowait)
    async with asyncio.timeout(SECONDS):
        while (await outputs.get()).finish_reason is None:
            pass
    return one


@pytest.mark.parametrize(
    ("poison", "error", "cause"),
    [
        (BROKEN, "IndexError", "computation"),
        (FULL, "OutOfMemoryError", "out_of_memory"),
    ],
)
async def test_a_step_that_raises_ends_the_sequence_that_makes_it(
    alone: FailingNode, poison: int, error: str, cause: str
) -> None:
    engine, counters = alone.engine, alone.engine.core.counters
    before = dict(counters.failed_sequences)
    by_itself = await ask(engine, GOOD)
    bad, *good = await asyncio.gather(
        ask(engine, poison), *(ask(engine, GOOD, 6 + n) for n in range(3))
    )
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error.startswith(error)
    assert all(one.finish_reason is FinishReason.LENGTH for one in good)
    assert good[0].outputs == by_itself.outputs
    assert counters.failed_steps[cause] >= 1
    assert counters.failed_sequences == before | {cause: 1, "not_finite": 0}
    engine.core._scheduler.pool.check()
    assert engine.core._scheduler.pool.counts().owned == 0


@pytest.mark.parametrize("poison", FULL_PLACES)
async def test_out_of_memory_anywhere_in_a_step_ends_only_the_request_that_asked_too_much(
    monkeypatch: pytest.MonkeyPatch, alone: FailingNode, poison: int
) -> None:
    """However many ask for it."""
    monkeypatch.setattr(core, "MAX_CONSECUTIVE_FAILURES", 2)
    engine = alone.engine
    before = await ask(engine, GOOD)
    bad = [await ask(engine, poison) for _ in range(3)]
    bad_one, good = await asyncio.gather(ask(engine, poison), ask(engine, GOOD, 9))
    for each in (*bad, bad_one):
        assert each.finish_reason is FinishReason.ERROR
        assert each.error.startswith("OutOfMemoryError")
    assert good.finish_reason is FinishReason.LENGTH and not alone.lost
    assert (await ask(engine, GOOD)).outputs == before.outputs
    engine.core._scheduler.pool.check()
    assert engine.core._scheduler.pool.counts().owned == 0


@pytest.mark.parametrize("poison", [BROKEN, FULL, *LATE.values()])
async def test_ranks_that_are_in_step_go_on_together(pair: FailingNode, poison: int) -> None:
    before = await ask(pair.engine, GOOD)
    assert (await ask(pair.engine, poison)).finish_reason is FinishReason.ERROR
    assert (await ask(pair.engine, GOOD, 7)).finish_reason is FinishReason.LENGTH
    assert (await ask(pair.engine, GOOD)).outputs == before.outputs


# The nodes are lost in what follows, so it comes last.


async def test_a_rank_that_leaves_the_others_in_a_collective_loses_the_node_soon(
    monkeypatch: pytest.MonkeyPatch, pair: FailingNode, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(executor, "AGREE_SECONDS", 0.2)
    leaving = {"on": 0, "off": 1}[request.node.callspec.params["pair"]]
    bad = await ask(pair.engine, ALONE[leaving])
    assert bad.finish_reason is FinishReason.ERROR
    assert pair.lost and "others hang in it: IndexError: no such block" in pair.lost[0]


async def test_a_node_on_which_nothing_works_any_more_is_lost(
    monkeypatch: pytest.MonkeyPatch, alone: FailingNode
) -> None:
    monkeypatch.setattr(core, "MAX_CONSECUTIVE_FAILURES", 3)
    for _ in range(2):
        await ask(alone.engine, BROKEN)
    await ask(alone.engine, GOOD)
    for _ in range(2):
        await ask(alone.engine, BROKEN)
    assert not alone.lost
    await ask(alone.engine, BROKEN)
    assert alone.lost == ["3 sequences failed in a row: IndexError: no such block"]
