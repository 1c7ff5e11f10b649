"""Rows a step under overload: prompts that are received against prompts that are prefilled here.

``python -m tandem.tests.benchmarks.overload``. A simulation of the scheduler and the block pool
(the real classes) on a decode node that gets more requests than it can serve. A received prompt's
blocks are reserved when those that go first have theirs, as ``decode_node/transfers.py`` does it,
and are filled some steps later. Everything is drawn from one seed, time is counted in steps, and
the same requests come to both sides. A row is a stream that gets a token in a step, so rows a step
are the throughput of what clients see.

The last load is beyond what the goal can reach: a prompt's blocks are idle while they are filled,
and where that takes a quarter of a sequence's time in a pool that is always full, a quarter of the
rows is the price. Steps of the local side with 512 prompt tokens count as one step all the same.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from tandem.shared.engine.plan import Sampled, StepResult
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import Sequence
from tandem.shared.errors import OverloadedError
from tandem.shared.kv.block_pool import BlockPool

from .report import write

STEPS = 4000
WARM_UP = 500
BLOCK = 16
TOKENS_OF_A_STEP = 512
GOAL = ">=0.95"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A decode node, and what comes to it. ``gap`` is the mean number of steps between arrivals;
    a transfer takes ``transfer_steps`` and one for each ``tokens_a_step`` of its prompt."""

    name: str
    blocks: int
    slots: int
    gap: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    transfer_steps: int = 4
    tokens_a_step: int = 256


LOADS = (
    Load(
        name="four slots and little memory",
        blocks=100,
        slots=4,
        gap=40.0,
        prompt=(100, 300),
        output=(100, 400),
    ),
    Load(
        name="memory for half of the slots",
        blocks=1000,
        slots=32,
        gap=10.0,
        prompt=(200, 1500),
        output=(50, 500),
    ),
    Load(
        name="more memory than slots",
        blocks=4000,
        slots=16,
        gap=10.0,
        prompt=(200, 1500),
        output=(50, 500),
    ),
    Load(
        name="long prompts and long transfers",
        blocks=4000,
        slots=32,
        gap=20.0,
        prompt=(1000, 8000),
        output=(50, 500),
        transfer_steps=10,
    ),
    Load(
        name="slow transfers of long prompts",
        blocks=2000,
        slots=32,
        gap=20.0,
        prompt=(1000, 8000),
        output=(50, 500),
        transfer_steps=20,
        tokens_a_step=64,
    ),
)


@dataclass(slots=True)
class Seen:
    """What one side came to, after the warm-up."""

    rows: int = 0
    thin: int = 0  # steps with at most one row
    computed: int = 0  # tokens of prompts, here
    preemptions: int = 0
    received: int = 0
    refused: int = 0


class Node:
    """One side: a scheduler, and the transfers that are under way."""

    def __init__(self, load: Load, *, remote: bool) -> None:
        self._load = load
        self._remote = remote
        self._random = random.Random(0)
        self._scheduler = Scheduler(
            BlockPool(load.blocks, BLOCK),
            max_num_batched_tokens=TOKENS_OF_A_STEP,
            max_num_seqs=load.slots,
            max_model_len=load.blocks * BLOCK,
            max_waiting=1024,
        )
        self._transfers: deque[tuple[int, Sequence, list[int]]] = deque()
        self._sequences: list[Sequence] = []
        self._next = 0.0
        self.seen = Seen()

    def run(self) -> Seen:
        for step in range(STEPS):
            if step == WARM_UP:
                self.seen = Seen(preemptions=-self._preemptions())
            self._arrive(step)
            self._settle(step)
            self._reserve(step)
            self._step()
        self.seen.preemptions += self._preemptions()
        return self.seen

    def _preemptions(self) -> int:
        return sum(one.preemptions for one in self._sequences)

    def _arrive(self, step: int) -> None:
        draw = self._random
        while self._next <= step:
            self._next += draw.expovariate(1 / self._load.gap)
            prompt = [draw.randrange(50_000) for _ in range(draw.randint(*self._load.prompt))]
            params = SamplingParams(max_tokens=draw.randint(*self._load.output))
            one = Sequence(len(self._sequences), prompt, params)
            self._sequences.append(one)
            try:
                self._scheduler.check_room()
            except OverloadedError:
                self.seen.refused += 1
                continue
            self._begin(one)

    def _begin(self, one: Sequence) -> None:
        if not self._remote:
            self._scheduler.add(one)
            return
        self._scheduler.ask(one, len(one.prompt) - 1)

    def _reserve(self, step: int) -> None:
        load = self._load
        while (granted := self._scheduler.next_reservation()) is not None:
            one, reserved = granted
            ready = step + load.transfer_steps + len(one.prompt) // load.tokens_a_step
            self._transfers.append((ready, one, reserved))

    def _settle(self, step: int) -> None:
        for ready, one, reserved in [t for t in self._transfers if t[0] <= step]:
            self._transfers.remove((ready, one, reserved))
            self._scheduler.commit_received(one, reserved, len(one.prompt) - 1)
            self.seen.received += 1

    def _step(self) -> None:
        plan = self._scheduler.schedule() if self._scheduler.has_work else None
        if plan is None:
            self.seen.thin += 1
            return
        drawn = [Sampled(row.sequence_id, [7]) for row in plan.sequences if row.sample]
        self._scheduler.apply(StepResult(plan.step, drawn))
        self.seen.rows += len(drawn)
        self.seen.thin += len(drawn) <= 1
        self.seen.computed += sum(len(row.tokens) for row in plan.sequences if len(row.tokens) > 1)


def main() -> None:
    rows = []
    for load in LOADS:
        here = Node(load, remote=False).run()
        there = Node(load, remote=True).run()
        measured = STEPS - WARM_UP
        print(f"{load.name}\n  prefilled here {here}\n  received       {there}")
        rows.append(
            {
                "metric": f"rows a step, received prompts, {load.name}",
                "value": there.rows / measured,
                "unit": "rows",
                "goal": GOAL,
                "against": f"prefilled here: {here.rows / measured:.2f}",
                "ratio": there.rows / here.rows,
            }
        )
        rows.append(
            {
                "metric": f"steps with at most one row, received prompts, {load.name}",
                "value": there.thin / measured,
                "unit": "of the steps",
                "against": f"prefilled here: {here.thin / measured:.3f}",
            }
        )
        rows.append(
            {
                "metric": f"prompt tokens computed here, received prompts, {load.name}",
                "value": there.computed,
                "unit": "tokens",
                "against": f"prefilled here: {here.computed}",
            }
        )
    print(write("overload", rows))


if __name__ == "__main__":
    main()
