"""Steps planned while the one before them runs: the same tokens, and no block handed over early."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tandem.shared.engine.plan import PLACEHOLDER, StepPlan, StepResult
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.queues import POLICIES
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.scheduling.steps_in_flight import MAX_STEPS
from tandem.shared.engine.sequence import FinishReason, Phase, Sequence, StepOutput
from tandem.shared.engine.work import Compute, Generate
from tandem.shared.kv.block_pool import BlockPool, OutOfBlocksError
from tandem.tests.shared.engine.scheduling.schedulers import make, reserve, sequence
from tandem.tests.support.simulated_ranks import EOS, STOP, SimulatedRanks, is_as_expected
from tandem.tests.support.step_rows import rows_of

SIZE = 4


class PlannedAhead(RuleBasedStateMachine):
    """Ranks run steps late, and their results are applied later still."""

    @initialize(
        blocks=st.integers(6, 20),
        slots=st.integers(1, 5),
        policy=st.sampled_from(POLICIES),
        prefixes=st.booleans(),
    )
    def start(self, blocks: int, slots: int, policy: str, prefixes: bool) -> None:
        self.limit = SIZE * blocks
        self.scheduler = Scheduler(
            BlockPool(blocks, SIZE, enable_prefix_cache=prefixes),
            max_num_batched_tokens=16,
            max_num_seqs=slots,
            max_model_len=self.limit,
            max_waiting=1000,
            policy=policy,
            eos_token_ids=(EOS,),
        )
        self.ranks = SimulatedRanks(SIZE)
        self.sequences: list[Sequence] = []
        self.transfers: list[Reception] = []
        self.sent: deque[StepPlan] = deque()
        self.done: deque[StepResult | None] = deque()
        self.shown: dict[Sequence, list[int]] = {}

    # ---- sequences come and go -----------------------------------------------------------------

    @rule(
        prompt=st.integers(2, 40),
        distinct=st.integers(0, 2),
        max_tokens=st.integers(1, 40),
        stops=st.booleans(),
        choices=st.integers(1, 3),
        how=st.sampled_from(["add", "add", "receive", "ask", "prefill", "private"]),
    )
    def arrive(
        self, prompt: int, distinct: int, max_tokens: int, stops: bool, choices: int, how: str
    ) -> None:
        tokens = [50 + distinct] * min(prompt, self.limit - 2)
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,) if stops else ())
        sequences = [
            Sequence(len(self.sequences) + i, tokens, Generate(params, seed=distinct + i))
            for i in range(choices)
        ]
        one, *siblings = sequences
        self.sequences += sequences if how in ("add", "receive", "ask") else [one]
        if how in ("prefill", "private"):
            one.work = Compute(len(tokens) - 1, how == "private")
        else:
            one.siblings = siblings
        if how == "receive":
            self._receive(one)
        elif how == "ask":
            self.scheduler.reservations.ask(one, len(tokens) - 1)
        else:
            self.scheduler.enqueue(one)

    def _receive(self, one: Sequence) -> None:
        try:
            reception = reserve(self.scheduler, one)
        except OutOfBlocksError:
            self.scheduler.enqueue(one)
            return
        self._begin_transfer(reception)

    def _begin_transfer(self, reception: Reception) -> None:
        # A transfer writes at any time: first something that nobody may read.
        for block in reception.blocks:
            for slot in range(SIZE):
                self.ranks.slots[block, slot] = ()
        self.transfers.append(reception)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), outcome=st.sampled_from(["commit", "commit", "abandon", "cancel"]))
    def settle(self, data: st.DataObject, outcome: str) -> None:
        index = data.draw(st.integers(0, len(self.transfers) - 1))
        reception = self.transfers.pop(index)
        one = reception.sequence
        end = len(one.prompt) - 1
        if outcome == "commit":
            self.ranks.write(one.block_table, one.prompt, one.computed, end)
            reception.commit(end)
        elif outcome == "abandon":
            reception.abandon()
        else:
            reception.cancel()
            self._cancel_siblings(one)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sequences))
        if one.phase is not Phase.RECEIVING:
            self.scheduler.cancel(one)
            self._cancel_siblings(one)

    def _cancel_siblings(self, one: Sequence) -> None:
        """Those that have not started are the core's to end, and are in no queue."""
        for sibling in one.siblings:
            if sibling.phase is Phase.WAITING:
                sibling.move(Phase.FINISHED)
                sibling.finish_reason = FinishReason.CANCELLED

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), poison=st.booleans())
    def spoil(self, data: st.DataObject, poison: bool) -> None:
        one = data.draw(st.sampled_from(self.sequences)).sequence_id
        (self.ranks.poison if poison else self.ranks.broken).add(one)

    # ---- steps ---------------------------------------------------------------------------------

    @rule()
    def plan(self) -> None:
        while (granted := self.scheduler.reservations.next_granted()) is not None:
            self._begin_transfer(granted)
        if self.scheduler.has_work and len(self.sent) + len(self.done) < MAX_STEPS:
            plan = self.scheduler.schedule()
            if plan is not None:
                self.sent.append(plan)

    @precondition(lambda self: self.sent)
    @rule()
    def run_step(self) -> None:
        self.done.append(self.ranks.run(self.sent.popleft()))

    @precondition(lambda self: self.done)
    @rule(memory=st.booleans())
    def apply(self, memory: bool) -> None:
        result = self.done.popleft()
        if result is not None:
            self._hand_out(self.scheduler.apply(result))
            return
        while self.sent:
            self.done.append(self.ranks.run(self.sent.popleft()))
        assert not any(self.done), "a step planned on a failed one is void"
        self.done.clear()
        self._hand_out(self.scheduler.step_failed("poison", memory=memory))

    def _hand_out(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.shown.setdefault(output.sequence, []).extend(output.tokens)
            if output.finish_reason is FinishReason.COMPUTED:
                self.scheduler.release_blocks(output.sequence)
            elif output.finish_reason is FinishReason.ERROR:
                self._cancel_siblings(output.sequence)
        self.scheduler.pool.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            for reception in self.transfers:
                reception.abandon()
            self.transfers.clear()
            self.plan()
            self.plan()
            if self.sent:
                self.run_step()
            if self.done:
                self.apply(memory=False)
            elif self.scheduler.idle:
                break
        assert self.scheduler.idle, "work is left that is never planned"
        counts = self.scheduler.pool.counts()
        assert counts.available == self.scheduler.pool.num_blocks, counts
        assert set(self.ranks.specs) <= set(self.scheduler._removed), "ranks keep what has ended"
        for one in self.sequences:
            assert one.phase is Phase.FINISHED and not one.in_flight and not one.placeholders
            assert is_as_expected(one, self.limit), (one.outputs, one.finish_reason)
            stop = [] if one.stop_token is None else [one.stop_token]
            assert self.shown.get(one, []) + stop == one.outputs


# ---- single decisions --------------------------------------------------------------------------


def next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def result(plan: StepPlan, token: int = 5) -> StepResult:
    return StepResult(plan.step, {row.sequence_id: [token] for row in rows_of(plan) if row.sample})


def test_the_token_of_the_step_in_flight_is_a_placeholder() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 20, max_tokens=3))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert [len(rows_of(plan)[0].tokens) for plan in (first, second)] == [16, 4]
    assert first.added and not first.ahead and second.ahead
    assert PLACEHOLDER not in rows_of(second)[0].tokens
    rows = [rows_of(plan)[0] for plan in (first, second)]
    assert [(row.first_block, len(row.blocks)) for row in rows] == [(0, 4), (4, 1)]
    scheduler.apply(result(first))
    [row] = rows_of(next_plan(scheduler))
    assert row.tokens == [PLACEHOLDER] and row.start == 20 and row.sample
    scheduler.apply(result(second))
    [output] = scheduler.apply(StepResult(3, {1: [6]}))
    assert output.sequence.outputs == [5, 6]


def test_at_most_two_steps_are_in_flight() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 4))
    for _ in range(MAX_STEPS):
        next_plan(scheduler)
    with pytest.raises(RuntimeError, match="no result"):
        scheduler.schedule()


def test_no_step_follows_the_last_token_that_a_sequence_may_have() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 4, max_tokens=2))
    plans = [next_plan(scheduler), next_plan(scheduler)]
    scheduler.apply(result(plans[0]))
    assert scheduler.schedule() is None
    [output] = scheduler.apply(result(plans[1]))
    assert output.finish_reason is FinishReason.LENGTH and scheduler.idle


def test_the_row_of_a_sequence_that_stopped_before_it_is_dropped() -> None:
    scheduler = make()
    scheduler.add(one := sequence(1, 4))
    first, second = next_plan(scheduler), next_plan(scheduler)
    [output] = scheduler.apply(result(first, EOS))
    assert output.finish_reason is FinishReason.STOP and one.block_table
    assert scheduler.apply(result(second)) == [] and one.outputs == [EOS]
    assert scheduler.idle and scheduler.pool.counts().owned == 0


def test_kv_that_was_not_finite_stays_out_of_the_index_in_later_steps_too() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(sequence(1, 17, max_tokens=1))
    first, second = next_plan(scheduler), next_plan(scheduler)
    [output] = scheduler.apply(StepResult(first.step, failed={1: "not finite"}))
    assert output.finish_reason is FinishReason.ERROR
    assert scheduler.apply(result(second)) == []
    assert scheduler.pool.counts().free == 32 and scheduler.idle


def test_a_step_that_fails_voids_the_one_planned_on_top_of_it() -> None:
    scheduler = make()
    scheduler.add(one := sequence(1, 4, max_tokens=3))
    scheduler.apply(result(next_plan(scheduler)))
    next_plan(scheduler)
    scheduler.add(two := sequence(2, 4, max_tokens=3))
    assert [spec.sequence_id for spec in next_plan(scheduler).added] == [2]
    [output] = scheduler.step_failed("broken", memory=False)
    assert output.sequence is one and not one.in_flight and not one.placeholders
    plan = next_plan(scheduler)
    assert plan.removed == [1, 2] and [spec.sequence_id for spec in plan.added] == [2]
    assert not plan.ahead and rows_of(plan)[0].start == 0 and two.outputs == []


def test_what_a_void_step_removes_is_removed_by_the_next_one() -> None:
    """Ranks that skip it would keep the slots of sequences that have ended."""
    scheduler = make()
    scheduler.add(sequence(1, 4, max_tokens=1))
    scheduler.add(sequence(2, 4, max_tokens=9))
    first, second = next_plan(scheduler), next_plan(scheduler)
    scheduler.apply(result(first))
    assert next_plan(scheduler).removed == [1] and second.removed == []
    scheduler.step_failed("broken", memory=True)
    assert sorted({*next_plan(scheduler).removed}) == [1, 2]


def test_a_sequence_is_retried_alone() -> None:
    scheduler = make()
    for number in (1, 2, 3):
        scheduler.add(sequence(number, 4))
    next_plan(scheduler)
    scheduler.step_failed("broken", memory=False)
    assert [row.sequence_id for row in rows_of(next_plan(scheduler))] == [1]
    assert scheduler.schedule() is None


def test_several_tokens_of_a_step_that_was_planned_on_are_an_error() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 4))
    first, _ = next_plan(scheduler), next_plan(scheduler)
    with pytest.raises(RuntimeError, match="expects one token"):
        scheduler.apply(StepResult(first.step, {1: [5, 6]}))


PlannedAhead.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestPlannedAhead = PlannedAhead.TestCase
