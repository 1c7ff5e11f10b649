"""Chunks that are cut by time: a long prompt costs running streams a share of their speed.

Time is a model: a step reads the weights, computes its tokens and attends to their contexts.
"""

from __future__ import annotations

import pytest

from tandem.shared.engine.pace import FIRST, LEAST, PROBE_EVERY, Pace
from tandem.shared.engine.plan import Sampled, SamplingParams, StepPlan, StepResult
from tandem.shared.engine.scheduler import Scheduler
from tandem.shared.engine.sequence import Phase, Sequence
from tandem.shared.kv.block_pool import BlockPool

WEIGHTS, TOKEN, ATTENDED = 0.02, 0.001, 1e-7


def seconds(plan: StepPlan) -> float:
    tokens = sum(len(row.tokens) for row in plan.sequences)
    attended = sum(len(row.tokens) * (row.start + len(row.tokens)) for row in plan.sequences)
    return max(WEIGHTS, TOKEN * tokens) + ATTENDED * attended + 0.2 * WEIGHTS


class Node:
    """A scheduler and its pace, on a clock that steps move."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.scheduler = Scheduler(
            BlockPool(4000, 16),
            max_num_batched_tokens=512,
            max_num_seqs=16,
            max_model_len=60_000,
            max_waiting=100,
        )
        self.clock = 0.0
        self.longest = 0.0

    def add(self, number: int, prompt: int, tokens: int) -> Sequence:
        one = Sequence(number, [number] * prompt, SamplingParams(max_tokens=tokens))
        self.scheduler.add(one)
        return one

    def step(self) -> None:
        plan = self.scheduler.schedule(self.pace.prompt_tokens)
        assert plan is not None
        spent = seconds(plan)
        self.clock += spent
        self.longest = max(self.longest, spent)
        prompts = sum(len(row.tokens) for row in plan.sequences if len(row.tokens) > 1)
        decoded = sum(len(row.tokens) == 1 for row in plan.sequences)
        self.pace.measured(spent, decoded=decoded, prompt_tokens=prompts)
        drawn = [Sampled(row.sequence_id, 7) for row in plan.sequences if row.sample]
        self.scheduler.apply(StepResult(plan.step, drawn))

    def first_token(self, one: Sequence) -> float:
        begun = self.clock
        while not one.outputs:
            self.step()
        return self.clock - begun


def streaming(pace: Pace, streams: int) -> tuple[Node, list[Sequence], float]:
    """A node with streams that run, and what each gets a second."""
    node = Node(pace)
    running = [node.add(n, 16, 50_000) for n in range(streams)]
    for _ in range(20):
        node.step()
    begun, before = node.clock, len(running[0].outputs)
    for _ in range(50):
        node.step()
    return node, running, (len(running[0].outputs) - before) / (node.clock - begun)


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("prompt", [600, 4000, 30_000])
def test_streams_keep_a_third_and_the_prompt_is_at_most_twice_as_late(
    prompt: int, streams: int
) -> None:
    quiet = Node(Pace())
    alone = quiet.first_token(quiet.add(100, prompt, 2))
    node, running, speed = streaming(Pace(), streams)
    before = len(running[0].outputs)
    took = node.first_token(node.add(100, prompt, 2))
    assert (len(running[0].outputs) - before) / took >= 0.3 * speed
    assert took <= 2 * alone


def test_without_a_target_the_prompt_would_stop_the_streams() -> None:
    node, running, speed = streaming(Pace(0), 1)
    before = len(running[0].outputs)
    took = node.first_token(node.add(100, 4000, 2))
    assert (len(running[0].outputs) - before) / took < 0.1 * speed


def test_steps_meet_a_target_that_is_given() -> None:
    node, _, _ = streaming(Pace(0.1), 4)
    one = node.add(100, 8000, 2)
    for _ in range(5):
        node.step()
    node.longest = 0.0
    node.first_token(one)
    assert 0.09 < node.longest < 0.12


def test_a_target_that_decoding_alone_misses_leaves_prompts_the_least() -> None:
    node, _, _ = streaming(Pace(0.001), 4)
    node.add(100, 8000, 2)
    node.step()
    assert node.pace.prompt_tokens == LEAST


def test_the_time_of_decoding_stays_known_while_prompts_never_end() -> None:
    pace = Pace()
    assert pace.prompt_tokens == FIRST
    for _ in range(PROBE_EVERY):
        pace.measured(0.1, decoded=1, prompt_tokens=32)
    assert pace.prompt_tokens == 0
    pace.measured(0.03, decoded=1, prompt_tokens=0)
    pace.measured(0.06, decoded=1, prompt_tokens=30)
    assert pace.prompt_tokens == 52


def test_prompts_without_streams_have_the_whole_budget() -> None:
    node = Node(Pace())
    one = node.add(100, 4000, 2)
    for _ in range(7):
        node.step()
    assert one.computed == 3584


def test_a_step_without_prompts_delays_nobody_who_is_alone() -> None:
    node, running, _ = streaming(Pace(), 1)
    for _ in range(PROBE_EVERY):
        node.pace.measured(0.1, decoded=1, prompt_tokens=32)
    waiting = node.add(100, 4000, 2)
    node.scheduler.cancel(running[0])
    node.step()
    assert waiting.phase is Phase.RUNNING and waiting.computed == 512
