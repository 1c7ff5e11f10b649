"""Schedulers, sequences and steps for the tests of scheduling."""

from __future__ import annotations

from typing import Any

from tandem.shared.engine.plan import StepPlan, StepResult
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import Sequence, StepOutput
from tandem.shared.engine.work import Generate
from tandem.shared.kv.block_pool import BlockPool, OutOfBlocksError
from tandem.tests.support.step_rows import rows_of

EOS = 999


def make(blocks: int = 32, size: int = 4, *, cache: bool = True, **options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_model_len": blocks * size,
        "max_waiting": 100,
        "eos_token_ids": (EOS,),
    }
    pool = BlockPool(blocks, size, enable_prefix_cache=cache)
    return Scheduler(pool, **(defaults | options))


def sequence(n: int, prompt: int, **params: Any) -> Sequence:
    return Sequence(n, [n * 1000 + i for i in range(prompt)], Generate(SamplingParams(**params)))


def run_step(scheduler: Scheduler, token: int = 5) -> tuple[StepPlan | None, list[StepOutput]]:
    plan = scheduler.schedule()
    if plan is None:
        return None, []
    samples = {row.sequence_id: [token] for row in rows_of(plan) if row.sample}
    outputs = scheduler.apply(StepResult(plan.step, samples))
    scheduler.pool.check()
    return plan, outputs


def drain(scheduler: Scheduler, limit: int = 2000) -> None:
    for _ in range(limit):
        if not scheduler.has_work:
            return
        plan, _ = run_step(scheduler)
        assert plan is not None, "work is left and nothing was scheduled: a deadlock"
    raise AssertionError(f"work is left after {limit} steps")


def reserve(scheduler: Scheduler, one: Sequence, end: int | None = None) -> Reception:
    """Reserve blocks up to ``end``, or for all but the prompt's last token."""
    scheduler.tables.match_prefix(one)
    return scheduler.reservations.reserve(one, len(one.prompt) - 1 if end is None else end)


def receive(scheduler: Scheduler, one: Sequence, outcome: str) -> None:
    try:
        reception = reserve(scheduler, one)
    except OutOfBlocksError:
        scheduler.add(one)
        return
    if outcome == "commit":
        reception.commit(len(one.prompt) - 1)
    elif outcome == "abandon":
        reception.abandon()
    else:
        reception.cancel()
