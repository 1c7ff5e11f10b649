"""The scheduler's promises: budget, order, preemption, conservation, progress."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.config.limits import BACKGROUND_PRIORITY
from tandem.shared.engine.plan import Sampled, StepPlan, StepResult
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.plan_rows import sampler_spec
from tandem.shared.engine.scheduling.queues import POLICIES
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import FinishReason, Phase, Sequence, StepOutput
from tandem.shared.errors import OverloadedError
from tandem.shared.kv.block_pool import BlockPool, OutOfBlocksError

EOS = 999


def make(blocks: int = 32, size: int = 4, **options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_model_len": blocks * size,
        "max_waiting": 100,
        "eos_token_ids": (EOS,),
    }
    return Scheduler(BlockPool(blocks, size), **(defaults | options))


def sequence(n: int, prompt: int, **params: Any) -> Sequence:
    return Sequence(n, [n * 1000 + i for i in range(prompt)], SamplingParams(**params))


def run_step(scheduler: Scheduler, token: int = 5) -> tuple[StepPlan | None, list[StepOutput]]:
    plan = scheduler.schedule()
    if plan is None:
        return None, []
    drawn = [Sampled(row.sequence_id, [token]) for row in plan.sequences if row.sample]
    outputs = scheduler.apply(StepResult(plan.step, drawn))
    scheduler.pool.check()
    return plan, outputs


def drain(scheduler: Scheduler, limit: int = 2000) -> None:
    for _ in range(limit):
        if not scheduler.has_work:
            return
        plan, _ = run_step(scheduler)
        assert plan is not None, "work is left and nothing was scheduled: a deadlock"
    raise AssertionError(f"work is left after {limit} steps")


def test_min_tokens_blocks_the_end_unless_nothing_else_is_allowed() -> None:
    for allowed, blocked in (((), [7, EOS]), ((5, 7), [7, EOS]), ((7, EOS), [])):
        params = SamplingParams(allowed_token_ids=allowed, stop_token_ids=(7,), min_tokens=3)
        assert sampler_spec(Sequence(1, [2], params), {EOS}).blocked_tokens == blocked


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


def test_long_prompts_are_chunked_and_decodes_go_first() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 4, max_tokens=8))
    run_step(scheduler)
    scheduler.add(sequence(2, 40))
    plan, _ = run_step(scheduler)
    assert plan is not None
    assert [(row.sequence_id, len(row.tokens)) for row in plan.sequences] == [(1, 1), (2, 15)]


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


def test_cached_prefixes_are_not_computed_again() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 9, max_tokens=1))
    drain(scheduler)
    again = sequence(1, 9, max_tokens=1)
    scheduler.add(again)
    plan, _ = run_step(scheduler)
    assert plan is not None and plan.sequences[0].start == 8 and again.cached == 8


def test_a_private_prompt_neither_takes_from_the_prefix_index_nor_enters_it() -> None:
    scheduler = make()
    for private in (True, False, True):
        one = sequence(1, 9, max_tokens=1)
        one.private = private
        scheduler.add(one)
        drain(scheduler)
        assert one.cached == 0
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
    canary = Sequence(999, list(range(13)), SamplingParams(), compute_until=12, private=True)
    canary.priority = 9
    scheduler.add(canary)
    run_step(scheduler)
    assert canary.finish_reason is FinishReason.COMPUTED
    scheduler.release_held(canary)


def test_a_private_prompt_takes_blocks_from_the_one_that_runs_last() -> None:
    scheduler = make(blocks=8)
    old, young = (sequence(n, 15, max_tokens=17) for n in (1, 2))
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.pool.counts().available == 0
    canary = Sequence(3, list(range(8)), SamplingParams(), compute_until=7, private=True)
    scheduler.add(canary)
    run_step(scheduler)
    assert canary.finish_reason is FinishReason.COMPUTED
    assert (old.preemptions, young.preemptions) == (0, 1)
    scheduler.release_held(canary)
    drain(scheduler)


def test_a_full_queue_takes_a_private_prompt() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(sequence(1, 3))
    private = sequence(2, 3)
    private.private = True
    scheduler.add(private)


def test_choices_share_the_prompt_of_the_first() -> None:
    scheduler = make()
    leader, sibling = sequence(1, 9, max_tokens=3), sequence(2, 9, max_tokens=3)
    sibling.prompt = leader.prompt
    leader.siblings = [sibling]
    scheduler.add(leader)
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert plan is not None
    assert {row.sequence_id: row.start for row in plan.sequences} == {1: 9, 2: 8}
    drain(scheduler)
    assert scheduler.pool.counts().owned == 0


def test_cancel_during_a_step_keeps_the_blocks_until_it_ends() -> None:
    scheduler = make()
    scheduler.add(one := sequence(1, 5))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.cancel(one)
    assert scheduler.pool.counts().owned == 2
    scheduler.apply(StepResult(plan.step, [Sampled(1, [5])]))
    assert scheduler.pool.counts().owned == 0 and scheduler.idle


def test_a_prompt_cancelled_during_its_last_step_holds_nothing() -> None:
    # A transfer can be confirmed before the step that computed its last layer has returned.
    scheduler = make()
    one = sequence(1, 10)
    one.compute_until = 9
    scheduler.add(one)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.cancel(one)
    scheduler.release_held(one)
    scheduler.apply(StepResult(plan.step, []))
    assert scheduler.pool.counts().owned == 0 and scheduler.idle


def test_a_full_queue_refuses() -> None:
    scheduler = make(max_waiting=1)
    scheduler.add(sequence(1, 3))
    with pytest.raises(OverloadedError, match="limit is 1"):
        scheduler.add(sequence(2, 3))


def test_received_prefix_leaves_one_token_to_compute() -> None:
    scheduler = make()
    one = sequence(1, 11, max_tokens=1)
    scheduler.match_prefix(one)
    reserved = scheduler.receive(one, 10)
    assert scheduler.pool.counts().reserved == 3 and scheduler.schedule() is None
    scheduler.commit_received(one, reserved, 10)
    plan, _ = run_step(scheduler)
    assert plan is not None and plan.sequences[0].start == 10
    assert len(plan.sequences[0].tokens) == 1


def test_a_failed_transfer_is_prefilled_here() -> None:
    scheduler = make()
    one = sequence(1, 11, max_tokens=1)
    scheduler.match_prefix(one)
    scheduler.abandon_received(one, scheduler.receive(one, 10))
    drain(scheduler)
    assert one.finish_reason is FinishReason.LENGTH


def test_a_prefill_only_sequence_holds_its_blocks_until_released() -> None:
    scheduler = make()
    one = sequence(1, 20)
    one.compute_until = 19
    scheduler.add(one)
    drain(scheduler)
    assert one.finish_reason is FinishReason.COMPUTED and scheduler.pool.counts().owned == 5
    scheduler.release_held(one)
    assert scheduler.pool.counts().owned == 0


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


def receive(scheduler: Scheduler, one: Sequence, outcome: str) -> None:
    scheduler.match_prefix(one)
    try:
        reserved = scheduler.receive(one, len(one.prompt) - 1)
    except OutOfBlocksError:
        scheduler.add(one)
        return
    if outcome == "commit":
        scheduler.commit_received(one, reserved, len(one.prompt) - 1)
    elif outcome == "abandon":
        scheduler.abandon_received(one, reserved)
    else:
        scheduler.cancel_received(one, reserved)


def test_received_prompts_that_wait_give_way_to_streams_that_run() -> None:
    scheduler = make(blocks=24, max_num_seqs=3, max_model_len=64)
    streams = [sequence(n, 4, max_tokens=28) for n in range(3)]
    for one in streams:
        scheduler.add(one)
    later = [sequence(10 + n, 13, max_tokens=4) for n in range(4)]
    for one in later:
        receive(scheduler, one, "commit")
    assert scheduler.pool.counts().owned == 12
    while any(s.phase is not Phase.FINISHED for s in streams):
        run_step(scheduler)
        assert not any(s.preemptions for s in streams)
    drain(scheduler)
    assert all(len(s.outputs) == 4 for s in later)


def test_the_head_of_the_queue_takes_back_what_later_ones_hold() -> None:
    scheduler = make(blocks=16, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)
    scheduler.add(runner := sequence(1, 4, max_tokens=12))
    received = sequence(2, 24, max_tokens=2)
    scheduler.match_prefix(received)
    reserved = scheduler.receive(received, 23)
    scheduler.add(head := sequence(3, 40, max_tokens=2))
    head.arrival, received.arrival = received.arrival, head.arrival
    run_step(scheduler)
    assert head.phase is Phase.WAITING, "only a transfer holds what it lacks"
    scheduler.commit_received(received, reserved, 23)
    run_step(scheduler)
    assert runner.phase is head.phase is Phase.RUNNING and received.received == 0
    drain(scheduler)


def test_what_would_not_do_is_not_taken_back() -> None:
    scheduler = make(blocks=16, max_num_batched_tokens=64, max_num_seqs=3, max_model_len=64)
    scheduler.add(sequence(1, 27, max_tokens=4))
    run_step(scheduler)
    received = sequence(3, 10, max_tokens=2)
    scheduler.match_prefix(received)
    reserved = scheduler.receive(received, 9)
    head = sequence(2, 50, max_tokens=2)
    scheduler.add(head)
    head.arrival = 2
    received.arrival = 3
    scheduler.commit_received(received, reserved, 9)
    run_step(scheduler)
    assert head.phase is Phase.WAITING and received.received == 9
    drain(scheduler)
    assert received.received == 9


def test_a_reservation_leaves_running_sequences_room_to_grow() -> None:
    scheduler = make(blocks=16, max_model_len=64)
    scheduler.add(sequence(1, 4, max_tokens=40))
    run_step(scheduler)
    one = sequence(2, 21)
    scheduler.match_prefix(one)
    with pytest.raises(OutOfBlocksError, match="9 of the 15 available ones are needed"):
        scheduler.receive(one, 28)
    assert len(scheduler.receive(one, 24)) == 6


def test_a_reservation_leaves_waiting_sequences_what_they_lack() -> None:
    scheduler = make(blocks=16, max_num_seqs=1)
    scheduler.add(sequence(1, 40))
    one = sequence(2, 30)
    scheduler.match_prefix(one)
    with pytest.raises(OutOfBlocksError, match="10 of the 16"):
        scheduler.receive(one, 28)
    run_step(scheduler)
    scheduler.add(sequence(3, 40))  # it has no slot to run in, whatever blocks are free
    assert len(scheduler.receive(one, 4)) == 1


# ---- steps that fail ---------------------------------------------------------------------------


def poisoned(scheduler: Scheduler, poison: set[int], *, memory: bool = False) -> list[StepOutput]:
    """A step of ranks that fail with any of these sequences."""
    plan = scheduler.schedule()
    assert plan is not None
    if poison & {row.sequence_id for row in plan.sequences}:
        return scheduler.step_failed("it does not compute", memory=memory)
    for row in plan.sequences:
        assert row.sequence_id not in plan.removed or row.sequence_id in {
            spec.sequence_id for spec in plan.added
        }
    drawn = [Sampled(row.sequence_id, [5]) for row in plan.sequences if row.sample]
    return scheduler.apply(StepResult(plan.step, drawn))


def test_only_the_sequence_that_fails_alone_ends_after_a_failed_step() -> None:
    scheduler = make()
    good = [sequence(n, 3 + n, max_tokens=3) for n in (1, 2, 3)]
    bad = sequence(4, 4, max_tokens=3)
    scheduler.add(good[0])
    run_step(scheduler)
    for one in (*good[1:], bad):
        scheduler.add(one)
    ended: list[StepOutput] = []
    while scheduler.has_work:
        ended += [o for o in poisoned(scheduler, {4}) if o.finish_reason is FinishReason.ERROR]
    assert [output.sequence for output in ended] == [bad]
    assert bad.error == "it does not compute" and not bad.outputs
    assert all(one.outputs == [5, 5, 5] for one in good)
    scheduler.pool.check()
    assert scheduler.idle and scheduler.pool.counts().owned == 0


def test_a_cancelled_sequence_of_a_failed_step_ends_at_once() -> None:
    scheduler = make()
    scheduler.add(gone := sequence(1, 3))
    scheduler.add(kept := sequence(2, 3, max_tokens=1))
    scheduler.schedule()
    scheduler.cancel(gone)
    assert not scheduler.step_failed("broken", memory=False)
    assert gone.finish_reason is FinishReason.CANCELLED
    drain(scheduler)
    assert kept.outputs == [5]


def test_ranks_forget_a_sequence_of_a_failed_step_and_get_it_again() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 3))
    run_step(scheduler)
    scheduler.add(sequence(2, 3))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.step_failed("broken", memory=False)
    plan, _ = run_step(scheduler)
    assert plan is not None
    assert plan.removed == [1, 2] and [spec.sequence_id for spec in plan.added] == [1]
    assert plan.added[0].outputs == [5]


def test_without_memory_a_smaller_chunk_is_tried() -> None:
    scheduler = make(blocks=64, max_num_batched_tokens=200)
    scheduler.add(one := sequence(1, 180, max_tokens=1))
    sizes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        sizes.append(len(plan.sequences[0].tokens))
        if sizes[-1] > 50:
            assert not scheduler.step_failed("out of memory", memory=True)
        else:
            drawn = [Sampled(row.sequence_id, [5]) for row in plan.sequences if row.sample]
            scheduler.apply(StepResult(plan.step, drawn))
    assert one.outputs == [5] and sizes[:3] == [180, 90, 45]


def test_a_sequence_that_never_fits_ends_and_the_others_go_on() -> None:
    scheduler = make(blocks=64, max_num_batched_tokens=64)
    scheduler.add(fits := sequence(1, 30, max_tokens=20))
    scheduler.add(never := sequence(2, 100, max_tokens=20))
    for _ in range(200):
        if not scheduler.has_work:
            break
        poisoned(scheduler, {2}, memory=True)
    assert never.finish_reason is FinishReason.ERROR and len(fits.outputs) == 20


def test_kv_of_a_failed_transfer_is_never_found() -> None:
    """Neither the KV of the step nor the KV it attended to: it is unknown which of it is bad."""
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(sequence(1, 17, max_tokens=1))
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.pool.peek(scheduler._queues.running[0].keys) == 4
    plan = scheduler.schedule()
    assert plan is not None
    [output] = scheduler.apply(StepResult(plan.step, [], failed={1: "not finite"}))
    assert output.finish_reason is FinishReason.ERROR and output.sequence.error == "not finite"
    assert scheduler.pool.counts().available == scheduler.pool.counts().free == 32
    scheduler.pool.check()


def test_a_prefill_only_sequence_whose_numbers_are_not_finite_holds_nothing() -> None:
    scheduler = make()
    one = sequence(1, 10)
    one.compute_until = 9
    scheduler.add(one)
    plan = scheduler.schedule()
    assert plan is not None
    [output] = scheduler.apply(StepResult(plan.step, [], failed={1: "not finite"}))
    assert output.finish_reason is FinishReason.ERROR
    assert scheduler.pool.counts().free == 32 and scheduler.idle


def test_reservations_are_granted_in_turn_and_nothing_overtakes_them() -> None:
    scheduler = make(blocks=16, max_num_seqs=4, max_model_len=64)
    scheduler.add(runner := sequence(1, 24, max_tokens=2))
    run_step(scheduler)
    scheduler.ask(large := sequence(2, 45, max_tokens=1), 44)
    scheduler.ask(small := sequence(3, 9, max_tokens=1), 8)
    scheduler.add(local := sequence(4, 4, max_tokens=1))
    assert scheduler.waiting == 3 and scheduler.next_reservation() is None
    run_step(scheduler)
    assert local.phase is Phase.WAITING
    while not runner.finish_reason:
        assert scheduler.next_reservation() is None
        run_step(scheduler)
    first = scheduler.next_reservation()
    assert first is not None and first[0] is large and len(first[1]) == 11
    second = scheduler.next_reservation()
    assert second is not None and second[0] is small
    for one, reserved in (first, second):
        scheduler.commit_received(one, reserved, len(one.prompt) - 1)
    drain(scheduler)
    assert scheduler.idle


def test_a_request_may_end_while_it_waits_for_a_reservation() -> None:
    scheduler = make(blocks=16, max_model_len=64)
    scheduler.ask(one := sequence(1, 40), 39)
    scheduler.cancel(one)
    assert scheduler.idle and not scheduler.asking and scheduler.next_reservation() is None


def watch_preemptions(scheduler: Scheduler) -> None:
    """Fail if a sequence is preempted while a later one keeps its blocks."""
    queues, preempt = scheduler._queues, scheduler._preemption._preempt

    def watched(sequence: Sequence) -> None:
        preempt(sequence)
        for other in queues.holders():
            assert queues.first(other, sequence), (
                f"{sequence.sequence_id} was preempted, and {other.sequence_id}, which runs later, "
                f"holds {len(other.block_table)} blocks"
            )

    scheduler._preemption._preempt = watched  # type: ignore[method-assign]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(POLICIES))
def test_no_sequence_is_preempted_while_a_later_one_holds_blocks(
    data: st.DataObject, policy: str
) -> None:
    """Received prompts, further choices and transfers in flight come and go at any time."""
    blocks, slots = data.draw(st.integers(6, 20)), data.draw(st.integers(1, 5))
    scheduler = Scheduler(
        BlockPool(blocks, 4, enable_prefix_cache=data.draw(st.booleans())),
        max_num_batched_tokens=16,
        max_num_seqs=slots,
        max_model_len=4 * blocks,
        max_waiting=100,
        policy=policy,
    )
    watch_preemptions(scheduler)
    transfers: list[tuple[Sequence, list[int]]] = []
    number = 0

    def arrive() -> None:
        nonlocal number
        if not data.draw(st.integers(0, 4)):
            canary = sequence(number, data.draw(st.integers(2, 12)))
            canary.private, canary.compute_until = True, len(canary.prompt) - 1
            number += 2
            scheduler.enqueue(canary)
            return
        prompt = data.draw(st.integers(2, 2 * blocks))
        one = sequence(number, prompt, max_tokens=data.draw(st.integers(1, 2 * blocks)))
        one.priority = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            one.siblings = [sequence(number + 1, prompt, max_tokens=4)]
            one.siblings[0].prompt = one.prompt
        number += 2
        if data.draw(st.booleans()):
            scheduler.add(one)
            return
        if data.draw(st.booleans()):
            scheduler.ask(one, len(one.prompt) - 1)
            return
        scheduler.match_prefix(one)
        try:
            transfers.append((one, scheduler.receive(one, len(one.prompt) - 1)))
        except OutOfBlocksError:
            scheduler.enqueue(one)

    def grant() -> None:
        while (granted := scheduler.next_reservation()) is not None:
            transfers.append(granted)

    def settle() -> None:
        one, reserved = transfers.pop(data.draw(st.integers(0, len(transfers) - 1)))
        if data.draw(st.integers(0, 3)):
            scheduler.commit_received(one, reserved, len(one.prompt) - 1)
        else:
            scheduler.abandon_received(one, reserved)

    for _ in range(data.draw(st.integers(5, 25))):
        if data.draw(st.booleans()):
            arrive()
        settles: bool = data.draw(st.booleans()) if transfers else False
        if settles:
            settle()
        grant()
        run_step(scheduler)
        for held in list(scheduler._held):
            scheduler.release_held(held)
    for _ in range(2000):
        grant()
        while transfers:
            settle()
        if not scheduler.has_work:
            break
        plan, _ = run_step(scheduler)
        for held in list(scheduler._held):
            scheduler.release_held(held)
        assert plan is not None, "work is left and nothing was scheduled: a deadlock"
    assert scheduler.idle and scheduler.pool.counts().available == blocks


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(POLICIES))
def test_everything_ends_and_every_block_returns(data: st.DataObject, policy: str) -> None:
    blocks = data.draw(st.integers(4, 12))
    scheduler = make(blocks=blocks, policy=policy, max_num_seqs=data.draw(st.integers(1, 5)))
    limit = blocks * 4
    alive: list[Sequence] = []
    for n in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(st.integers(1, limit - 2))
        one = sequence(n, prompt, max_tokens=data.draw(st.integers(1, limit - prompt)))
        one.prompt = [data.draw(st.integers(0, 1)) for _ in range(prompt)]
        one.priority = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            one.compute_until = max(1, prompt - 1)
        alive.append(one)
        if one.compute_until is None and prompt > 1 and data.draw(st.booleans()):
            receive(scheduler, one, data.draw(st.sampled_from(["commit", "abandon", "cancel"])))
        else:
            scheduler.add(one)
        for _ in range(data.draw(st.integers(0, 3))):
            run_step(scheduler)
            for held in list(scheduler._held):
                scheduler.release_held(held)
        if data.draw(st.booleans()):
            scheduler.cancel(data.draw(st.sampled_from(alive)))
    for _ in range(3000):
        if not scheduler.has_work:
            break
        plan, _ = run_step(scheduler)
        for held in list(scheduler._held):
            scheduler.release_held(held)
        assert plan is not None or not scheduler.has_work
    assert scheduler.idle and scheduler.pool.counts().available == blocks
    assert all(s.phase is Phase.FINISHED for s in alive)
