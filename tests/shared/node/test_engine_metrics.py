"""The engine's series on a node's page."""

from __future__ import annotations

from functools import partial

from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence, StepOutput
from tandem.shared.engine.work import Generate
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.waiting import until


def value(node: FakeNode, name: str) -> float:
    [sample] = [s.value for s in node.metrics.samples() if s.name == name]
    return sample


async def test_queue_time_and_prefix_hits_are_counted_once_a_sequence() -> None:
    node = FakeNode("d", 1)
    node.ranks.says = 7
    prompt = list(range(40))
    async with node.running():
        for number in (1, 2):
            reasons: list[object] = []

            def note(output: StepOutput, reasons: list[object] = reasons) -> None:
                reasons.append(output.finish_reason)

            one = Sequence(number, prompt, Generate(SamplingParams(max_tokens=2)))
            node.core.submit(one, note)
            await until(partial(any, reasons))
    assert value(node, "tandem_queue_seconds_count") == 2
    assert value(node, "tandem_prefix_cache_queries_total") == 80
    assert value(node, "tandem_prefix_cache_hits_total") == 32  # two whole blocks, the second time
    assert value(node, "vllm:num_preemptions_total") == 0
    assert value(node, "tandem_engine_steps_total") == 4
    assert value(node, "vllm:iteration_tokens_total_count") == 4
    buckets = [s for s in node.metrics.samples() if s.name == "vllm:iteration_tokens_total_bucket"]
    assert {s.labels["le"]: s.value for s in buckets}["1.0"] == 2, "the second token of each"
    assert dict(buckets[0].labels).keys() == {"le", "model_name", "engine"}
    assert value(node, "tandem_preemptions_total") == 0


async def test_blocks_in_use_are_a_share_of_all() -> None:
    node = FakeNode("d", 1, blocks=64)
    node.ranks.says = 7
    node.ranks.computes.clear()
    async with node.running():
        node.core.submit(
            Sequence(1, list(range(64)), Generate(SamplingParams(max_tokens=1))),
            lambda output: None,
        )
        await until(lambda: node.scheduler.running == 1)
        # One step computes all 64 tokens, which are four blocks.
        assert value(node, "tandem_kv_usage_ratio") == 4 / 64
        assert value(node, "tandem_sequences_running") == 1
        node.ranks.computes.set()


async def test_sequences_that_fail_are_counted_by_cause() -> None:
    node = FakeNode("d", 1)
    node.ranks.fails = "numbers are not finite"
    async with node.running():
        reasons: list[object] = []
        one = Sequence(1, [1, 2, 3], Generate(SamplingParams(max_tokens=1)))
        node.core.submit(one, lambda output: reasons.append(output.finish_reason))
        await until(lambda: any(reasons))
    assert node.metric("tandem_sequences_failed_total", cause="not_finite") == 1
    assert node.metric("tandem_sequences_failed_total", cause="out_of_memory") == 0
