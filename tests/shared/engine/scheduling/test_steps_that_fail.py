"""Steps that fail: the scheduler finds the sequence at fault, and the others lose nothing."""

from __future__ import annotations

from tandem.shared.engine.plan import StepResult
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import FinishReason, StepOutput
from tandem.shared.engine.work import Compute
from tandem.tests.shared.engine.scheduling.schedulers import drain, make, run_step, sequence
from tandem.tests.support.step_rows import rows_of


def run_poisoned_step(
    scheduler: Scheduler, poison: set[int], *, memory: bool = False
) -> list[StepOutput]:
    """A step of ranks that fail with any of these sequences."""
    plan = scheduler.schedule()
    assert plan is not None
    if poison & {row.sequence_id for row in rows_of(plan)}:
        return scheduler.step_failed("it does not compute", memory=memory)
    for row in rows_of(plan):
        assert row.sequence_id not in plan.removed or row.sequence_id in {
            spec.sequence_id for spec in plan.added
        }
    samples = {row.sequence_id: [5] for row in rows_of(plan) if row.sample}
    return scheduler.apply(StepResult(plan.step, samples))


def test_only_the_sequence_that_fails_alone_ends_after_a_failed_step() -> None:
    scheduler = make()
    good = [sequence(n, 3 + n, max_tokens=3) for n in (1, 2, 3)]
    bad = sequence(4, 4, max_tokens=3)
    scheduler.add(good[0])
    run_step(scheduler)
    for one in (*good[1:], bad):
        scheduler.add(one)
    outputs: list[StepOutput] = []
    while scheduler.has_work:
        outputs += [
            o for o in run_poisoned_step(scheduler, {4}) if o.finish_reason is FinishReason.ERROR
        ]
    assert [output.sequence for output in outputs] == [bad]
    assert bad.error == "it does not compute" and not bad.outputs
    assert all(one.outputs == [5, 5, 5] for one in good)
    scheduler.pool.check()
    assert scheduler.idle and scheduler.pool.counts().owned == 0


def test_a_cancelled_sequence_of_a_failed_step_ends_at_once() -> None:
    scheduler = make()
    scheduler.add(victim := sequence(1, 3))
    scheduler.add(survivor := sequence(2, 3, max_tokens=1))
    scheduler.schedule()
    scheduler.cancel(victim)
    assert not scheduler.step_failed("broken", memory=False)
    assert victim.finish_reason is FinishReason.CANCELLED
    drain(scheduler)
    assert survivor.outputs == [5]


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
        sizes.append(len(rows_of(plan)[0].tokens))
        if sizes[-1] > 50:
            assert not scheduler.step_failed("out of memory", memory=True)
        else:
            samples = {row.sequence_id: [5] for row in rows_of(plan) if row.sample}
            scheduler.apply(StepResult(plan.step, samples))
    assert one.outputs == [5] and sizes[:3] == [180, 90, 45]


def test_a_sequence_that_never_fits_ends_and_the_others_go_on() -> None:
    scheduler = make(blocks=64, max_num_batched_tokens=64)
    scheduler.add(fits := sequence(1, 30, max_tokens=20))
    scheduler.add(never := sequence(2, 100, max_tokens=20))
    for _ in range(200):
        if not scheduler.has_work:
            break
        run_poisoned_step(scheduler, {2}, memory=True)
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
    [output] = scheduler.apply(StepResult(plan.step, failed={1: "not finite"}))
    assert output.finish_reason is FinishReason.ERROR and output.sequence.error == "not finite"
    assert scheduler.pool.counts().available == scheduler.pool.counts().free == 32
    scheduler.pool.check()


def test_a_waiting_sequence_does_not_keep_a_prefix_whose_kv_is_bad() -> None:
    scheduler = make(max_num_batched_tokens=32)
    scheduler.add(sequence(2, 4, max_tokens=20))
    run_step(scheduler)
    scheduler.add(failing := sequence(1, 60))
    waiting = sequence(3, 60)
    waiting.prompt = failing.prompt
    assert scheduler.schedule(20) is not None
    scheduler.apply(StepResult(0, {2: [5]}))
    scheduler.add(waiting)
    assert scheduler.schedule(20) is not None and waiting.computed == 20
    scheduler.apply(StepResult(0, {2: [5]}, failed={1: "not finite"}))
    assert not waiting.block_table and waiting.computed == 0
    scheduler.pool.check()


def test_a_prefill_only_sequence_whose_numbers_are_not_finite_holds_nothing() -> None:
    scheduler = make()
    one = sequence(1, 10)
    one.work = Compute(9)
    scheduler.add(one)
    plan = scheduler.schedule()
    assert plan is not None
    [output] = scheduler.apply(StepResult(plan.step, failed={1: "not finite"}))
    assert output.finish_reason is FinishReason.ERROR
    assert scheduler.pool.counts().free == 32 and scheduler.idle
