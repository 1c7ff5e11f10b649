"""Thinking budgets on their way from the APIs to nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import TEMPLATE


def budget_of(c: InProcess) -> pb.ThinkingBudget | None:
    """The budget in the last request to the node."""
    sampling = c.node.requests[-1].sampling
    return sampling.thinking if sampling.HasField("thinking") else None


@pytest.mark.parametrize(
    ("parser", "ending", "start"),
    [
        ("qwen3", "", "<think>"),
        ("qwen3", "<think>\n", ""),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>"),
        ("deepseek_r1", "", ""),
    ],
)
def test_a_budget_has_the_markers_of_the_output(parser: str, ending: str, start: str) -> None:
    with InProcessResponses(tiny(TEMPLATE + ending), reasoning_parser=parser) as c:
        for tokens, expected in ((7, 7), (0, 0), (-1, None), (None, None)):
            assert c.chat(thinking_token_budget=tokens).status_code == 200
            budget = budget_of(c)
            assert (None if budget is None else budget.tokens) == expected
            assert budget is None or (budget.start, budget.end) == (start, "</think>")
        c.create(input="hi", thinking_token_budget=4)
        budget = budget_of(c)
        assert budget is not None and budget.tokens == 4


def test_a_budget_ends_the_analysis_of_channels() -> None:
    options: dict[str, Any] = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    c = InProcess(**options)
    assert c.chat(thinking_token_budget=3).status_code == 200
    budget = budget_of(c)
    assert budget is not None
    assert (budget.start, budget.end) == ("<|channel|>analysis<|message|>", "<|end|>")


def test_a_budget_needs_a_parser_of_the_reasoning() -> None:
    c = InProcess()
    response = c.chat(thinking_token_budget=3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_token_budget"
    assert c.chat(thinking_token_budget=-1).status_code == 200
    c = InProcess(reasoning_parser="qwen3")
    response = c.chat(thinking_token_budget=3, use_beam_search=True, n=2, temperature=0)
    assert "not available with 'use_beam_search'" in response.json()["error"]["message"]
