"""Steps that give several tokens for a sequence end it where one token a step would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.engine.plan import PositionLogprobs, SequenceStep, StepResult
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import FinishReason, Sequence, StepOutput
from tandem.tests.shared.engine.scheduling.schedulers import EOS, make, sequence
from tandem.tests.support.step_rows import rows_of

STOP = 7


def token_at(position: int) -> int:
    """The only token that the model draws at a position; one in eleven is a stop token."""
    return {0: STOP, 5: EOS}.get(position * 31 % 11, 100 + position)


def sampled_tokens(row: SequenceStep, count: int) -> list[int]:
    first = row.start + len(row.tokens)
    return [token_at(position) for position in range(first, first + count)]


def run(one: Sequence, tokens_a_step: int, **options: Any) -> tuple[Sequence, list[StepOutput]]:
    """The sequence at its end, with its outputs, beside another one in a small pool."""
    scheduler = make(blocks=20, size=4, **options)
    scheduler.add(one)
    scheduler.add(sequence(9, 11, max_tokens=20, ignore_eos=True))
    outputs: list[StepOutput] = []
    for _ in range(500):
        if (plan := scheduler.schedule()) is None:
            break
        rows = [row for row in rows_of(plan) if row.sample]
        sampled = {row.sequence_id: sampled_tokens(row, tokens_a_step) for row in rows}
        logprobs = {
            key: [PositionLogprobs(token, -0.5, 1) for token in tokens]
            for key, tokens in sampled.items()
        }
        outputs += scheduler.apply(StepResult(plan.step, sampled, logprobs))
        scheduler.pool.check()
    assert scheduler.idle and scheduler.pool.counts().owned == 0
    return one, [output for output in outputs if output.sequence is one]


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.integers(1, 20),
    tokens_a_step=st.integers(2, 6),
    params=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 40),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.sampled_from([(), (STOP,)]),
        }
    ),
    max_model_len=st.sampled_from([25, 60]),
)
def test_the_same_tokens_come_in_fewer_steps(
    prompt: int, tokens_a_step: int, params: dict[str, Any], max_model_len: int
) -> None:
    singly, expected = run(sequence(1, prompt, **params), 1, max_model_len=max_model_len)
    one, outputs = run(sequence(1, prompt, **params), tokens_a_step, max_model_len=max_model_len)
    assert one.outputs == singly.outputs
    assert (one.finish_reason, one.stop_token) == (singly.finish_reason, singly.stop_token)
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == [token for output in expected for token in output.tokens]
    for output in outputs:
        assert [position.token for position in output.logprobs] == output.tokens
    assert [output.prompt_done for output in outputs if output.tokens][:1] in ([], [True])
    assert len(outputs) <= len(expected)


@pytest.mark.parametrize("tokens_a_step", [1, 3])
def test_tokens_after_the_end_are_dropped(tokens_a_step: int) -> None:
    one, outputs = run(sequence(1, 3, max_tokens=4, ignore_eos=True), tokens_a_step)
    assert one.finish_reason is FinishReason.LENGTH and len(one.outputs) == 4
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_other_choices_start_after_the_first_tokens_of_the_leader() -> None:
    scheduler: Scheduler = make()
    leader, sibling = sequence(1, 6, max_tokens=6), sequence(2, 6, max_tokens=6)
    sibling.prompt = leader.prompt
    leader.siblings = [sibling]
    scheduler.add(leader)
    for _ in range(20):
        if (plan := scheduler.schedule()) is None:
            break
        rows = {row.sequence_id: [5, 5, 5] for row in rows_of(plan) if row.sample}
        scheduler.apply(StepResult(plan.step, rows))
        scheduler.pool.check()
    assert leader.outputs == sibling.outputs == [5] * 6
    assert scheduler.idle
