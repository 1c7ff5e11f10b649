"""The times of sequences until their prompts are computed."""

from __future__ import annotations

import time

from tandem.shared.engine.first_steps import FirstSteps
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence, StepOutput
from tandem.shared.engine.work import Generate
from tandem.tests.support.clock import SteppedClock
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.waiting import until


def test_the_wait_is_for_blocks_and_in_the_queue_but_not_for_a_transfer() -> None:
    clock = SteppedClock()
    times = FirstSteps(clock)
    clock.now += 30.0  # of a transfer
    times.queued(one := Sequence(1, [1], Generate(SamplingParams())), 2.0)
    clock.now += 0.5
    assert times.started(one) == 2.5
    clock.now += 9.0
    assert times.forget(one) == 130.5 and times.forget(one) == 0.0


def test_a_choice_that_shares_its_leaders_prompt_has_no_times() -> None:
    times = FirstSteps(SteppedClock())
    assert times.started(one := Sequence(1, [1], Generate(SamplingParams()))) is None
    assert times.forget(one) == 0.0


async def test_the_output_of_a_computed_prompt_says_when_its_first_step_started() -> None:
    node = FakeNode("d", 1)
    node.ranks.says = 5
    outputs: list[StepOutput] = []
    one = Sequence(1, list(range(100)), Generate(SamplingParams(max_tokens=2)))  # in two chunks
    submitted_at = time.monotonic()
    node.core.submit(one, outputs.append)
    async with node.running():
        await until(lambda: one.finish_reason is not None)
    chunk, first, last = outputs
    assert submitted_at < first.started_at < time.monotonic()
    assert (chunk.started_at, last.started_at) == (0.0, 0.0)
