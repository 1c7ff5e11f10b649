"""Rows per step under overload: received prompts against locally prefilled ones.

``python -m tandem.benchmarks.overload``. A simulation of the scheduler and the block pool (the real
classes) on a decode node with more requests than it can serve. The blocks of a received prompt are
reserved in order of arrival, as in ``decode_node/transfers.py``, and filled some steps later. One
seed determines everything, time is counted in steps, and both sides get the same requests. A row is
a stream that gets a token in a step.

Rows per step favour the node that prefills locally: its step with 512 prompt tokens counts as one
step, as if it took no longer than a decode step. So a second figure counts rows in the time of one
decode step, with a prompt token taking as long on this node as on a prefill node. The last load has
a goal for that figure only: blocks are idle while they are filled, and if filling takes a quarter
of a sequence's lifetime in a full pool, it costs a quarter of the rows per step.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from tandem.benchmarks.support.report import publish
from tandem.shared.engine.plan import StepResult
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Generate
from tandem.shared.errors import OverloadedError
from tandem.shared.kv.block_pool import BlockPool
from tandem.tests.support.step_rows import rows_of

STEPS = 4000
WARM_UP = 500
BLOCK = 16
TOKENS_OF_A_STEP = 512
GOAL = ">=0.95"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A decode node and its load. ``gap`` is the mean number of steps between arrivals; a transfer
    takes ``transfer_steps`` plus one step per ``tokens_a_step`` of its prompt."""

    name: str
    blocks: int
    slots: int
    gap: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    transfer_steps: int = 4
    tokens_a_step: int = 256
    goal: str = GOAL  # for rows a step


LOADS = (
    Overload(
        name="four slots and little memory",
        blocks=100,
        slots=4,
        gap=40.0,
        prompt=(100, 300),
        output=(100, 400),
    ),
    Overload(
        name="memory for half of the slots",
        blocks=1000,
        slots=32,
        gap=10.0,
        prompt=(200, 1500),
        output=(50, 500),
    ),
    Overload(
        name="more memory than slots",
        blocks=4000,
        slots=16,
        gap=10.0,
        prompt=(200, 1500),
        output=(50, 500),
    ),
    Overload(
        name="long prompts and long transfers",
        blocks=4000,
        slots=32,
        gap=20.0,
        prompt=(1000, 8000),
        output=(50, 500),
        transfer_steps=10,
    ),
    Overload(
        name="slow transfers of long prompts",
        blocks=2000,
        slots=32,
        gap=20.0,
        prompt=(1000, 8000),
        output=(50, 500),
        transfer_steps=20,
        tokens_a_step=64,
        goal="",
    ),
)


@dataclass(slots=True)
class RowsSeen:
    """One side's results after the warm-up."""

    rows: int = 0
    steps: int = 0
    time: float = 0.0  # in decode steps
    thin: int = 0  # steps with at most one row
    computed: int = 0  # tokens of prompts, here
    preemptions: int = 0
    received: int = 0
    refused: int = 0


class OverloadedNode:
    """One side: a scheduler and its transfers in progress.

    With ``timed``, prompt tokens lengthen the step that computes them.
    """

    def __init__(self, load: Overload, *, remote: bool, timed: bool) -> None:
        self._load = load
        self._remote = remote
        self._timed = timed
        self._random = random.Random(0)
        self._scheduler = Scheduler(
            BlockPool(load.blocks, BLOCK),
            max_num_batched_tokens=TOKENS_OF_A_STEP,
            max_num_seqs=load.slots,
            max_model_len=load.blocks * BLOCK,
            max_waiting=1024,
        )
        self._transfers: deque[tuple[float, Reception]] = deque()
        self._sequences: list[Sequence] = []
        self._next = 0.0
        self.counts = RowsSeen()

    def run(self) -> RowsSeen:
        now = 0.0
        warm = False
        while now < STEPS:
            if not warm and now >= WARM_UP:
                warm = True
                self.counts = RowsSeen(preemptions=-self._preemptions())
            self._arrive(now)
            self._settle(now)
            self._reserve(now)
            took = self._step()
            self.counts.steps += 1
            self.counts.time += took
            now += took
        self.counts.preemptions += self._preemptions()
        return self.counts

    def _preemptions(self) -> int:
        return sum(one.preemptions for one in self._sequences)

    def _arrive(self, now: float) -> None:
        draw = self._random
        while self._next <= now:
            self._next += draw.expovariate(1 / self._load.gap)
            prompt = [draw.randrange(50_000) for _ in range(draw.randint(*self._load.prompt))]
            params = SamplingParams(max_tokens=draw.randint(*self._load.output))
            one = Sequence(len(self._sequences), prompt, Generate(params))
            self._sequences.append(one)
            try:
                self._scheduler.check_room()
            except OverloadedError:
                self.counts.refused += 1
                continue
            self._begin(one)

    def _begin(self, one: Sequence) -> None:
        if not self._remote:
            self._scheduler.add(one)
            return
        self._scheduler.reservations.ask(one, len(one.prompt) - 1)

    def _reserve(self, now: float) -> None:
        load = self._load
        while (reception := self._scheduler.reservations.next_granted()) is not None:
            prompt = len(reception.sequence.prompt)
            ready = now + load.transfer_steps + prompt // load.tokens_a_step
            self._transfers.append((ready, reception))

    def _settle(self, now: float) -> None:
        for ready, reception in [t for t in self._transfers if t[0] <= now]:
            self._transfers.remove((ready, reception))
            reception.commit(len(reception.sequence.prompt) - 1)
            self.counts.received += 1

    def _step(self) -> float:
        """Run one step. Returns its duration, in decode steps."""
        plan = self._scheduler.schedule() if self._scheduler.has_work else None
        if plan is None:
            self.counts.thin += 1
            return 1.0
        sampled = {row.sequence_id: [7] for row in rows_of(plan) if row.sample}
        self._scheduler.apply(StepResult(plan.step, sampled))
        computed = sum(len(row.tokens) for row in rows_of(plan) if len(row.tokens) > 1)
        self.counts.rows += len(sampled)
        self.counts.thin += len(sampled) <= 1
        self.counts.computed += computed
        return 1.0 + (computed / self._load.tokens_a_step if self._timed else 0.0)


def rows_a_step(load: Overload) -> list[dict[str, Any]]:
    """Figures of both sides, with all steps of equal duration."""
    here = OverloadedNode(load, remote=False, timed=False).run()
    there = OverloadedNode(load, remote=True, timed=False).run()
    print(f"{load.name}\n  prefilled here {here}\n  received       {there}")
    return [
        {
            "metric": f"rows a step, received prompts, {load.name}",
            "value": there.rows / there.steps,
            "unit": "rows",
            "goal": load.goal,
            "against": f"prefilled here: {here.rows / here.steps:.2f}",
            "ratio": there.rows / there.steps / (here.rows / here.steps),
        },
        {
            "metric": f"steps with at most one row, received prompts, {load.name}",
            "value": there.thin / there.steps,
            "unit": "of the steps",
            "against": f"prefilled here: {here.thin / here.steps:.3f}",
        },
        {
            "metric": f"prompt tokens computed here, received prompts, {load.name}",
            "value": there.computed,
            "unit": "tokens",
            "against": f"prefilled here: {here.computed}",
        },
    ]


def rows_in_time(load: Overload) -> dict[str, Any]:
    """Figures of both sides, with prompt tokens taking time."""
    here = OverloadedNode(load, remote=False, timed=True).run()
    there = OverloadedNode(load, remote=True, timed=True).run()
    print(f"  in time        {there.rows / there.time:.2f} against {here.rows / here.time:.2f}")
    return {
        "metric": f"rows in the time of a decode step, received prompts, {load.name}",
        "value": there.rows / there.time,
        "unit": "rows",
        "goal": GOAL,
        "against": f"prefilled here: {here.rows / here.time:.2f}",
        "ratio": there.rows / there.time / (here.rows / here.time),
    }


def main() -> None:
    rows = []
    for load in LOADS:
        rows += [*rows_a_step(load), rows_in_time(load)]
    publish("overload", rows)


if __name__ == "__main__":
    main()
