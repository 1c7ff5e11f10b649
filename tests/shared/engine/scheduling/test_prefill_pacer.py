"""Chunks that are cut by time: a long prompt costs running streams a share of their speed.

Time is a model, with the figures of 135 M parameters on a core: a step reads the weights, computes
tokens, attends to their contexts, and reads each chunk's context once besides.
"""

from __future__ import annotations

import pytest

from tandem.shared.engine.counters import PrefillRate
from tandem.shared.engine.plan import StepPlan, StepResult
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.prefill_pacer import (
    MAX_SKIPPED,
    MIN_CHUNK,
    PROBE_EVERY,
    PrefillPacer,
)
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.scheduling.step_budget import SMALL_PROMPT, StepCounts
from tandem.shared.engine.sequence import Phase, Sequence
from tandem.shared.engine.work import Generate
from tandem.shared.kv.block_pool import BlockPool
from tandem.tests.shared.engine.scheduling.schedulers import receive
from tandem.tests.support.step_rows import rows_of

WEIGHTS, TOKEN, ATTENDED, CONTEXT = 0.05, 2.2e-3, 0.9e-6, 12e-6


def seconds(plan: StepPlan) -> float:
    duration = WEIGHTS
    for row in rows_of(plan):
        count = len(row.tokens)
        duration += (TOKEN if count > 1 else 0.1 * TOKEN) * count
        duration += ATTENDED * count * (row.start + count / 2)
        duration += CONTEXT * row.start if count > 1 else 0
    return duration


def beside_streams(chunk: int) -> StepCounts:
    return StepCounts.of([1, chunk] if chunk else [1])


class PacedNode:
    """A scheduler and its pacer, on a clock that steps move."""

    def __init__(self, pacer: PrefillPacer) -> None:
        self.pacer = pacer
        self.scheduler = Scheduler(
            BlockPool(40_000, 16),
            max_num_batched_tokens=512,
            max_num_seqs=16,
            max_model_len=60_000,
            max_waiting=100,
        )
        self.clock = 0.0
        self.longest = 0.0

    def add(self, number: int, prompt: int, tokens: int) -> Sequence:
        one = Sequence(number, [number] * prompt, Generate(SamplingParams(max_tokens=tokens)))
        self.scheduler.add(one)
        return one

    def step(self) -> None:
        plan = self.scheduler.schedule(self.pacer.limit)
        assert plan is not None
        duration = seconds(plan)
        self.clock += duration
        self.longest = max(self.longest, duration)
        self.pacer.measured(duration, StepCounts.of(len(row.tokens) for row in rows_of(plan)))
        samples = {row.sequence_id: [7] for row in rows_of(plan) if row.sample}
        self.scheduler.apply(StepResult(plan.step, samples))

    def first_token(self, one: Sequence) -> float:
        start_time = self.clock
        while not one.outputs:
            self.step()
        return self.clock - start_time


def streaming(pacer: PrefillPacer, streams: int) -> tuple[PacedNode, list[Sequence], float]:
    """A node with streams that run, and what each gets a second."""
    node = PacedNode(pacer)
    running = [node.add(n, 16, 50_000) for n in range(streams)]
    for _ in range(20):
        node.step()
    start_time, before = node.clock, len(running[0].outputs)
    for _ in range(50):
        node.step()
    return node, running, (len(running[0].outputs) - before) / (node.clock - start_time)


@pytest.mark.parametrize(
    ("prompt", "streams"), [(600, 1), (600, 8), (4000, 1), (4000, 8), (30_000, 1)]
)
def test_streams_keep_a_third_and_the_prompt_is_at_most_twice_as_late(
    prompt: int, streams: int
) -> None:
    quiet = PacedNode(PrefillPacer())
    alone = quiet.first_token(quiet.add(100, prompt, 2))
    node, running, speed = streaming(PrefillPacer(), streams)
    before = len(running[0].outputs)
    seconds = node.first_token(node.add(100, prompt, 2))
    assert (len(running[0].outputs) - before) / seconds >= 0.3 * speed
    assert seconds <= 2 * alone


def test_without_a_target_the_prompt_would_stop_the_streams() -> None:
    node, running, speed = streaming(PrefillPacer(0), 1)
    before = len(running[0].outputs)
    seconds = node.first_token(node.add(100, 4000, 2))
    assert (len(running[0].outputs) - before) / seconds < 0.1 * speed


def test_steps_meet_a_target_that_is_given() -> None:
    node, _, _ = streaming(PrefillPacer(0.4), 4)
    one = node.add(100, 2000, 2)
    for _ in range(5):
        node.step()
    node.longest = 0.0
    node.first_token(one)
    assert 0.37 < node.longest < 0.46


def test_where_the_smallest_chunk_takes_longer_streams_get_steps_of_their_own() -> None:
    node, running, _ = streaming(PrefillPacer(0.15), 4)
    node.add(100, 30_000, 2)
    for _ in range(100):
        node.step()
    start_time, before = node.clock, len(running[0].outputs)
    for _ in range(200):
        node.step()
    assert node.longest > 0.17
    assert (node.clock - start_time) / (len(running[0].outputs) - before) == pytest.approx(
        0.15, rel=0.1
    )


def test_a_target_that_decoding_alone_misses_leaves_prompts_a_third_of_the_time() -> None:
    quiet = PacedNode(PrefillPacer())
    alone = quiet.first_token(quiet.add(100, 4000, 2))
    node, _, _ = streaming(PrefillPacer(0.001), 4)
    assert node.first_token(node.add(100, 4000, 2)) < 4 * alone


def test_after_a_pause_of_the_machine_prompts_go_on() -> None:
    node, _, _ = streaming(PrefillPacer(), 1)
    one = node.add(100, 4000, 2)
    node.step()
    node.pacer.measured(1000.0, beside_streams(MIN_CHUNK))
    for _ in range(MAX_SKIPPED):
        assert node.pacer.limit == 0
        node.step()
    node.step()
    assert one.computed == 2 * MIN_CHUNK


def test_the_time_of_decoding_stays_known_while_prompts_never_end() -> None:
    pacer = PrefillPacer()
    assert pacer.limit == 0
    pacer.measured(1 / 16, beside_streams(0))
    assert pacer.limit == MIN_CHUNK
    for _ in range(PROBE_EVERY):
        pacer.measured(1 / 8, beside_streams(64))
    assert pacer.limit == 0
    pacer.measured(1 / 16, beside_streams(0))
    assert pacer.limit == 128


def test_chunks_outgrow_what_each_costs_besides_its_tokens() -> None:
    """As on a GPU, where a step with a chunk launches each kernel, and a decode step one graph."""
    decode, chunk_cost, token = 0.002, 0.015, 5e-6
    pacer = PrefillPacer()

    def prompt(tokens: int) -> tuple[float, int]:
        """Seconds and steps of a prompt while a stream decodes."""
        seconds, steps = 0.0, 0
        while tokens:
            chunk = min(pacer.limit or 0, tokens)
            duration = decode + (chunk_cost + token * chunk if chunk else 0.0)
            pacer.measured(duration, beside_streams(chunk))
            tokens, seconds, steps = tokens - chunk, seconds + duration, steps + 1
        return seconds, steps

    prompt(60_000)
    seconds, steps = prompt(60_000)
    assert steps * decode >= 0.3 * seconds
    assert seconds < 5 * token * 60_000


def test_a_received_prompt_continues_at_once() -> None:
    node, _, _ = streaming(PrefillPacer(0.001), 4)
    one = Sequence(100, [100] * 1000, Generate(SamplingParams(max_tokens=2)))
    receive(node.scheduler, one, "commit")
    node.pacer.measured(10.0, beside_streams(32))
    assert node.pacer.limit == 0
    node.step()
    assert one.outputs


@pytest.mark.parametrize("decoded_before", [0, 20])
def test_small_prompts_in_every_step_do_not_stop_a_long_one(decoded_before: int) -> None:
    node = PacedNode(PrefillPacer())
    node.add(1, 16, 50_000)
    for _ in range(1 + decoded_before):
        node.step()
    one = node.add(2, 4000, 2)
    for number in range(3, 300):
        node.add(number, SMALL_PROMPT, 2)
        node.step()
    assert one.outputs


def test_prompts_without_streams_have_the_whole_budget() -> None:
    node = PacedNode(PrefillPacer())
    one = node.add(100, 4000, 2)
    for _ in range(7):
        node.step()
    assert one.computed == 3584


def test_a_limit_from_before_does_not_delay_a_prompt_that_is_alone() -> None:
    node, running, _ = streaming(PrefillPacer(), 1)
    node.pacer.measured(10.0, beside_streams(32))
    assert node.pacer.limit == 0
    waiting = node.add(100, 4000, 2)
    node.scheduler.cancel(running[0])
    node.step()
    assert waiting.phase is Phase.RUNNING and waiting.computed == 512


def test_the_rate_of_prompts_counts_the_steps_that_go_without_them() -> None:
    """The rate predicts the end of a local prefill, and so decides where a prompt is prefilled."""
    rate = PrefillRate()
    rate.measured(0.5, beside_streams(100), limit=100)
    assert rate.tokens_per_second == 200
    for small in (0, 5, 0):  # the end of a received prompt is computed whatever the limit
        rate.measured(0.125, beside_streams(small), limit=0)
    rate.measured(0.125, beside_streams(100), limit=100)
    assert rate.tokens_per_second == pytest.approx(0.7 * 200 + 0.3 * 200)
    rate.measured(0.125, beside_streams(100), limit=100)
    assert rate.tokens_per_second == pytest.approx(0.7 * 200 + 0.3 * 800)


def test_short_prompts_show_a_lower_bound_of_the_rate() -> None:
    rate = PrefillRate()
    for chunk, seconds in ((30, 0.5), (60, 0.3), (16, 0.08), (0, 0.1)):
        rate.measured(seconds, beside_streams(chunk), limit=512)
    assert (rate.tokens_per_second, rate.lower_bound) == (0, pytest.approx(200))
    rate.measured(0.2, beside_streams(0), limit=0)
    rate.measured(0.05, beside_streams(40), limit=512)
    assert rate.lower_bound == pytest.approx(200), "it waited for a step"
    rate.measured(1.0, beside_streams(512), limit=512)
    assert rate.tokens_per_second == 512


def test_prompts_that_waited_too_long_owe_nothing_for_the_steps_before() -> None:
    pacer = PrefillPacer(0.1)
    pacer.measured(0.05, beside_streams(0))
    for _ in range(3):
        pacer.measured(100.0, beside_streams(MIN_CHUNK))
    chunks = 0
    for _ in range(4 * (MAX_SKIPPED + 1)):
        chunk = pacer.limit or 0
        chunks += chunk > 0
        pacer.measured(0.05 if not chunk else 0.06, beside_streams(chunk))
    assert chunks > 2 * (MAX_SKIPPED + 1)
