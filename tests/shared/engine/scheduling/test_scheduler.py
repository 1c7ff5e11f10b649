"""The scheduler's promises: budget, order, preemption, shared prefixes, ends."""

from __future__ import annotations

import pytest

from tandem.shared.config.limits import BACKGROUND_PRIORITY
from tandem.shared.engine.plan import PositionLogprobs, StepResult
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.plan_rows import sampler_spec
from tandem.shared.engine.scheduling.queues import POLICIES
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import FinishReason, Phase, Sequence
from tandem.shared.engine.work import Compute, Generate
from tandem.shared.errors import OverloadedError
from tandem.tests.shared.engine.scheduling.schedulers import (
    EOS,
    drain,
    make,
    reserve,
    run_step,
    sequence,
)
from tandem.tests.support.step_rows import rows_of


def test_min_tokens_blocks_the_end_unless_nothing_else_is_allowed() -> None:
    for allowed, blocked in (((), [7, EOS]), ((5, 7), [7, EOS]), ((7, EOS), [])):
        params = SamplingParams(allowed_token_ids=allowed, stop_token_ids=(7,), min_tokens=3)
        assert sampler_spec(Sequence(1, [2], Generate(params)), {EOS}).blocked_tokens == blocked


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_goes_last_and_leaves_slots_free(policy: str) -> None:
    scheduler = make(policy=policy, max_num_seqs=4)
    background = [sequence(n, 1, max_tokens=9) for n in range(4)]
    for one in background:
        one.priority = BACKGROUND_PRIORITY
        scheduler.add(one)
    run_step(scheduler)
    assert [one.phase for one in background] == [Phase.RUNNING] * 2 + [Phase.WAITING] * 2
    others = [sequence(10 + n, 3, max_tokens=2) for n in range(2)]
    for one in others:
        scheduler.add(one)
    run_step(scheduler)
    assert all(one.phase is Phase.RUNNING for one in others)
    drain(scheduler)
    assert all(one.finish_reason is FinishReason.LENGTH for one in background)


@pytest.mark.parametrize(("policy", "order"), [("priority", [3, 2, 1]), ("fcfs", [1, 2, 3])])
def test_priorities_of_users_order_the_queue_and_who_gives_way(
    policy: str, order: list[int]
) -> None:
    """The lowest number goes first where there is one slot, and last gives up its blocks."""

    def added(scheduler: Scheduler) -> dict[int, Sequence]:
        sequences = {n: sequence(n, 7, max_tokens=9) for n in (1, 2, 3)}
        for one, priority in zip(sequences.values(), (5, 0, -5), strict=True):
            one.priority = priority
            scheduler.add(one)
        return sequences

    one_slot = make(policy=policy, max_num_seqs=1)
    added(one_slot)
    starts: list[int] = []
    while not one_slot.idle:
        plan, _ = run_step(one_slot)
        assert plan is not None
        starts += [row.sequence_id for row in rows_of(plan) if row.start == 0]
    assert starts == order

    few_blocks = make(policy=policy, blocks=8, max_model_len=16)
    sequences = added(few_blocks)
    drain(few_blocks)
    first, _, last = (sequences[n].preemptions for n in order)
    assert first == 0 and last > 0


def test_long_prompts_are_chunked_and_decodes_go_first() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 4, max_tokens=8))
    run_step(scheduler)
    scheduler.add(sequence(2, 40))
    plan, _ = run_step(scheduler)
    assert plan is not None
    assert [(row.sequence_id, len(row.tokens)) for row in rows_of(plan)] == [(1, 1), (2, 15)]


def test_the_rest_of_a_limit_beside_streams_is_given_to_no_long_prompt() -> None:
    """A chunk that is too small to count would be given to each of them."""
    scheduler = make(blocks=200, max_num_seqs=99, max_num_batched_tokens=400)
    scheduler.add(sequence(1, 4, max_tokens=8))
    run_step(scheduler)
    scheduler.add(sequence(2, 56))
    for n in range(3, 13):
        scheduler.add(sequence(n, 70))
    plan = scheduler.schedule(64)
    assert plan is not None
    assert {row.sequence_id: len(row.tokens) for row in rows_of(plan)} == {1: 1, 2: 56}


def test_a_sequence_ends_at_eos_and_the_stop_token_is_not_output() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 3))
    _, [output] = run_step(scheduler, EOS)
    assert output.tokens == [] and output.sequence.stop_token == EOS
    assert output.sequence.finish_reason is FinishReason.STOP
    assert scheduler.idle


def test_max_tokens_ends_with_length() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 3, max_tokens=2))
    run_step(scheduler)
    _, [output] = run_step(scheduler)
    assert output.sequence.finish_reason is FinishReason.LENGTH


def test_the_youngest_is_preempted_and_keeps_its_tokens() -> None:
    scheduler = make(blocks=4, max_model_len=16)
    old, young = sequence(1, 7, max_tokens=9), sequence(2, 7, max_tokens=9)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(3):
        run_step(scheduler)
    assert young.preemptions and not old.preemptions
    tokens = list(young.outputs)
    drain(scheduler)
    assert young.outputs[: len(tokens)] == tokens and len(young.outputs) == 9


def test_a_prompt_that_is_preempted_has_its_logprobs_once() -> None:
    scheduler = make(blocks=6, max_num_batched_tokens=3)
    old, young = sequence(1, 3, max_tokens=20), sequence(2, 15, prompt_logprobs=1, max_tokens=1)
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.idle:
        plan = scheduler.schedule()
        assert plan is not None
        logprobs = {}
        for row in rows_of(plan):
            if row.sequence_id == 2:
                end = min(row.start + len(row.tokens), 14)
                logprobs[2] = [PositionLogprobs(at, 0.0, 1) for at in range(row.start, end)]
        samples = {row.sequence_id: [5] for row in rows_of(plan) if row.sample}
        scheduler.apply(StepResult(plan.step, samples, prompt_logprobs=logprobs))
    assert young.preemptions
    assert [each.token for each in young.prompt_logprobs] == list(range(14))


def test_cached_prefixes_are_not_computed_again() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 9, max_tokens=1))
    drain(scheduler)
    again = sequence(1, 9, max_tokens=1)
    scheduler.add(again)
    plan, _ = run_step(scheduler)
    assert plan is not None and rows_of(plan)[0].start == 8 and again.cached == 8


def test_a_prompt_that_waits_keeps_its_cached_prefix_which_may_grow() -> None:
    scheduler = make(max_num_batched_tokens=21)
    scheduler.add(sequence(1, 20, max_tokens=1))
    run_step(scheduler)
    scheduler.add(sequence(2, 4, max_tokens=20))
    run_step(scheduler)
    scheduler.add(waiting := sequence(1, 60))
    for _ in range(2):
        assert scheduler.schedule(0) is not None
        scheduler.apply(StepResult(0, {2: [5]}))
        assert (waiting.phase, waiting.computed, waiting.cached) == (Phase.WAITING, 20, 20)
    longer = sequence(1, 40, max_tokens=1)
    longer.mid_stream = True
    scheduler.add(longer)
    run_step(scheduler)
    plan = scheduler.schedule(20)
    assert plan is not None and waiting.cached == 40
    assert (rows_of(plan)[-1].start, len(rows_of(plan)[-1].tokens)) == (40, 20)


def test_a_private_prompt_neither_takes_from_the_prefix_index_nor_enters_it() -> None:
    scheduler = make()
    for private in (True, False, True):
        one = sequence(1, 9)
        one.work = Compute(9, private)
        scheduler.add(one)
        drain(scheduler)
        assert one.cached == 0
        scheduler.release_blocks(one)
    assert scheduler.pool.counts().cached == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_private_prompt_is_computed_in_the_next_step_whatever_runs_or_waits(policy: str) -> None:
    """All slots decode but for one, whose long prompt takes whole steps, and many wait."""
    scheduler = make(blocks=512, max_num_seqs=4, max_waiting=400, policy=policy)
    for n in range(3):
        scheduler.add(sequence(n, 2, max_tokens=50))
    run_step(scheduler)
    scheduler.add(sequence(3, 1000))
    for n in range(300):
        scheduler.add(sequence(10 + n, 1))
    run_step(scheduler)
    canary = Sequence(999, list(range(13)), Compute(12, private=True))
    canary.priority = 9
    scheduler.add(canary)
    run_step(scheduler)
    assert canary.finish_reason is FinishReason.COMPUTED
    scheduler.release_blocks(canary)


def test_a_private_prompt_takes_blocks_from_the_one_that_runs_last() -> None:
    scheduler = make(blocks=8)
    old, young = (sequence(n, 15, max_tokens=17) for n in (1, 2))
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.pool.counts().available == 0
    canary = Sequence(3, list(range(8)), Compute(7, private=True))
    scheduler.add(canary)
    run_step(scheduler)
    assert canary.finish_reason is FinishReason.COMPUTED
    assert (old.preemptions, young.preemptions) == (0, 1)
    scheduler.release_blocks(canary)
    drain(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_in_mid_stream_is_computed_before_prompts_that_run_or_wait(policy: str) -> None:
    scheduler = make(policy=policy)
    running, waiting, moved = sequence(1, 60), sequence(2, 60), sequence(3, 20)
    for one in (running, waiting):
        scheduler.add(one)
    run_step(scheduler)
    moved.mid_stream, moved.outputs = True, [7, 8, 9]
    scheduler.add(moved)
    run_step(scheduler)
    assert (moved.computed, running.computed, waiting.computed) == (16, 16, 0)
    run_step(scheduler)
    assert len(moved.outputs) == 4 and running.computed == 16 + 16 - 7
    drain(scheduler)


def test_a_full_queue_takes_a_private_prompt() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(sequence(1, 3))
    private = sequence(2, 3)
    private.work = Compute(2, private=True)
    scheduler.add(private)


def test_private_prompts_count_neither_as_running_nor_as_waiting() -> None:
    """A router would take them for another router's, and place prompts elsewhere."""
    scheduler = make(max_waiting=1)
    canary, other, received = (Sequence(n, list(range(40)), Compute(39, True)) for n in range(3))
    scheduler.add(canary)
    reception = reserve(scheduler, received, 39)
    assert scheduler.waiting == 0
    run_step(scheduler)
    assert canary.phase is Phase.RUNNING and scheduler.running == 0
    scheduler.add(other)
    scheduler.add(sequence(4, 3))  # there is room for one that waits
    assert (scheduler.running, scheduler.waiting) == (0, 1)
    reception.cancel()
    drain(scheduler)


def test_choices_share_the_prompt_of_the_first() -> None:
    scheduler = make()
    leader, sibling = sequence(1, 9, max_tokens=3), sequence(2, 9, max_tokens=3)
    sibling.prompt = leader.prompt
    leader.siblings = [sibling]
    scheduler.add(leader)
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert plan is not None
    assert {row.sequence_id: row.start for row in rows_of(plan)} == {1: 9, 2: 8}
    drain(scheduler)
    assert scheduler.pool.counts().owned == 0


def test_a_choice_that_lacks_a_block_keeps_the_shared_prompt() -> None:
    scheduler = make(blocks=3, cache=False)
    leader, sibling = sequence(1, 9, max_tokens=3), sequence(2, 9, max_tokens=3)
    leader.siblings = [sibling]
    scheduler.add(leader)
    while leader.phase is not Phase.FINISHED:
        run_step(scheduler)
        assert sibling.computed == (8 if leader.outputs else 0)
    plan, _ = run_step(scheduler)
    assert plan is not None and rows_of(plan)[0].start == 8


def test_cancel_during_a_step_keeps_the_blocks_until_it_ends() -> None:
    scheduler = make()
    scheduler.add(one := sequence(1, 5))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.cancel(one)
    assert scheduler.pool.counts().owned == 2
    scheduler.apply(StepResult(plan.step, {1: [5]}))
    assert scheduler.pool.counts().owned == 0 and scheduler.idle


def test_a_prompt_cancelled_during_its_last_step_holds_nothing() -> None:
    # A transfer can be confirmed before the step that computed its last layer has returned.
    scheduler = make()
    one = sequence(1, 10)
    one.work = Compute(9)
    scheduler.add(one)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.cancel(one)
    scheduler.release_blocks(one)
    scheduler.apply(StepResult(plan.step))
    assert scheduler.pool.counts().owned == 0 and scheduler.idle


def test_a_full_queue_refuses() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(sequence(1, 3))
    with pytest.raises(OverloadedError, match="limit is 1"):
        scheduler.add(sequence(2, 3))


def test_shortest_first_cannot_starve_a_long_prompt() -> None:
    scheduler = make(policy="shortest-first", max_num_seqs=1)
    long = sequence(1, 100, max_tokens=1)
    scheduler.add(long)
    for n in range(2, 40):
        scheduler.add(sequence(n, 2, max_tokens=1))
        run_step(scheduler)
        if long.phase is not Phase.WAITING:
            return
    raise AssertionError("38 later arrivals passed the first one")
