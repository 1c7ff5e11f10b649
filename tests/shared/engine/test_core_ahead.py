"""The core over ranks that reply late: the same tokens with one step in flight and with two."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tandem.shared.engine.core import EngineCore
from tandem.shared.engine.executor import ExecutorLostError, StepFailedError
from tandem.shared.engine.messages import KVSending
from tandem.shared.engine.plan import (
    COMPUTATION,
    VOID,
    StepFailure,
    StepPlan,
    StepResult,
    TokenMasks,
)
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.scheduling.steps_in_flight import MAX_STEPS
from tandem.shared.engine.sequence import FinishReason, Phase, Sequence, StepOutput
from tandem.shared.engine.work import Generate
from tandem.shared.kv.block_pool import BlockPool
from tandem.tests.support.simulated_ranks import (
    EOS,
    FIRST_TOKEN,
    STOP,
    SimulatedRanks,
    is_as_expected,
)

T = TypeVar("T")
SIZE = 4
# A text may end with these tokens, which only the listener notices.
UNWANTED = range(FIRST_TOKEN, FIRST_TOKEN + 8)


class LateExecutor:
    """Steps that are computed and completed when the test says so."""

    def __init__(self) -> None:
        self.ranks = SimulatedRanks(SIZE)
        self.waiting: deque[StepPlan] = deque()
        self.max_in_flight = 0  # steps in flight at once
        self._results: asyncio.Queue[StepResult | StepFailure | None] = asyncio.Queue()

    def submit(self, plan: StepPlan, sending: list[KVSending]) -> None:
        self.waiting.append(plan)
        self.max_in_flight = max(self.max_in_flight, len(self.waiting) + self._results.qsize())

    def send_masks(self, masks: TokenMasks) -> None:
        raise AssertionError("no row is masked")

    async def result(self) -> StepResult:
        result = await self._results.get()
        if result is None:
            raise ExecutorLostError("gone")
        if isinstance(result, StepFailure):
            raise StepFailedError(result)
        return result

    def run_step(self) -> None:
        void = self.ranks.failed and self.waiting[0].ahead
        result = self.ranks.run(self.waiting.popleft())
        failure = StepFailure(VOID if void else COMPUTATION, "poison")
        self._results.put_nowait(failure if result is None else result)

    def lose(self) -> None:
        self._results.put_nowait(None)


class LateResults(RuleBasedStateMachine):
    @initialize(blocks=st.integers(6, 20), slots=st.integers(1, 5), steps=st.integers(1, MAX_STEPS))
    def start(self, blocks: int, slots: int, steps: int) -> None:
        self.limit = SIZE * blocks
        self.steps = steps
        self.scheduler = Scheduler(
            BlockPool(blocks, SIZE),
            max_num_batched_tokens=16,
            max_num_seqs=slots,
            max_model_len=self.limit,
            max_waiting=1000,
            eos_token_ids=(EOS,),
        )
        self.loop = asyncio.new_event_loop()
        self.executor = LateExecutor()
        self.sequences: list[Sequence] = []
        self.shown: dict[Sequence, list[int]] = {}
        self.ended: dict[Sequence, FinishReason] = {}
        self.receiving: list[Reception] = []
        self.lost = False

        async def begin() -> tuple[EngineCore, asyncio.Task[None]]:
            core = EngineCore(self.scheduler, self.executor, max_steps=steps)
            return core, asyncio.create_task(core.run())

        self.core, self.running = self.run(begin())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def settle(self) -> None:
        """Let the core do all that it can before the next result."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.scheduler.pool.check()

    # ---- requests --------------------------------------------------------------------------

    @rule(
        prompt=st.integers(2, 40),
        distinct=st.integers(0, 2),
        max_tokens=st.integers(1, 40),
        stops=st.booleans(),
        choices=st.integers(1, 3),
        receives=st.booleans(),
    )
    def arrive(
        self, prompt: int, distinct: int, max_tokens: int, stops: bool, choices: int, receives: bool
    ) -> None:
        if self.lost:
            return
        tokens = [50 + distinct] * min(prompt, self.limit - 2)
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,) if stops else ())
        sequences = [
            Sequence(self.core.new_id(), tokens, Generate(params, seed=distinct + i))
            for i in range(choices)
        ]
        sequences[0].siblings = sequences[1:]
        self.sequences += sequences
        if receives:
            self.core.match_prefix(sequences[0])
            self.core.listen(sequences[0], self.listen)
            reception = self.core.reserve(sequences[0], len(tokens) - 1)
            if reception is None:
                self.core.enqueue(sequences[0])
            else:
                self.receiving.append(reception)
        else:
            self.core.submit(sequences[0], self.listen)
        self.run(self.settle())

    def listen(self, output: StepOutput) -> None:
        one = output.sequence
        assert one not in self.ended, "an output after the last one"
        for token in output.tokens:
            self.shown.setdefault(one, []).append(token)
            if token in UNWANTED and one.sequence_id % 3 == 0:
                self.end(one)
                return
        if output.finish_reason is not None:
            self.ended[one] = output.finish_reason

    def end(self, one: Sequence) -> None:
        """End a choice as a stop string or a client does."""
        for each in (one, *one.siblings):
            self.ended.setdefault(each, FinishReason.CANCELLED)
        self.core.cancel(one)

    @precondition(lambda self: self.receiving)
    @rule(arrived=st.booleans())
    def received(self, arrived: bool) -> None:
        reception = self.receiving.pop()
        one = reception.sequence
        end = len(one.prompt) - 1
        if arrived:
            self.executor.ranks.write(one.block_table, one.prompt, one.computed, end)
            reception.commit(end)
        else:
            reception.abandon()
        self.run(self.settle())

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sequences))
        if one.phase is not Phase.RECEIVING:
            self.end(one)
        self.run(self.settle())

    # ---- ranks -----------------------------------------------------------------------------

    @precondition(lambda self: self.executor.waiting)
    @rule()
    def complete(self) -> None:
        self.executor.run_step()
        self.run(self.settle())

    @precondition(lambda self: self.executor.waiting)
    @rule()
    def complete_all(self) -> None:
        """Ranks have computed everything before the head hears of anything."""
        while self.executor.waiting:
            self.executor.run_step()
        self.run(self.settle())

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), poison=st.booleans())
    def spoil(self, data: st.DataObject, poison: bool) -> None:
        one = data.draw(st.sampled_from(self.sequences)).sequence_id
        ranks = self.executor.ranks
        (ranks.poison if poison else ranks.broken).add(one)

    @precondition(lambda self: self.executor.waiting and len(self.sequences) > 6)
    @rule()
    def lose(self) -> None:
        self.lost = True
        self.executor.waiting.clear()
        self.executor.lose()
        self.run(self.settle())

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(3000):
            while self.receiving:
                self.received(arrived=False)
            if self.executor.waiting:
                self.complete()
            elif self.lost or self.scheduler.idle:
                break
        self.running.cancel()
        self.run(asyncio.wait_for(asyncio.gather(self.running, return_exceptions=True), 10))
        self.loop.close()
        assert self.executor.max_in_flight <= self.steps
        if self.lost:
            assert not self.core.stepping
            return
        assert self.scheduler.idle
        assert self.scheduler.pool.counts().available == self.scheduler.pool.num_blocks
        times = self.core._first_steps
        assert not times._queued_at and not times._started_at
        for one in self.sequences:
            assert one.phase is Phase.FINISHED and one in self.ended
            assert is_as_expected(one, self.limit), (one.outputs, one.finish_reason)
            tokens = self.shown.get(one, [])
            assert tokens == one.outputs[: len(tokens)]


LateResults.TestCase.settings = settings(max_examples=75, stateful_step_count=50, deadline=None)
TestLateResults = LateResults.TestCase
