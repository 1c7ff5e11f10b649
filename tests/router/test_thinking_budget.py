"""Thinking budgets, from the APIs to the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.support import TEMPLATE, Cluster, cluster, make_model


def last_budget(c: Cluster) -> pb.ThinkingBudget | None:
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
async def test_a_budget_has_the_markers_of_the_output(
    tmp_path: Path, parser: str, ending: str, start: str
) -> None:
    make_model(tmp_path / "model", TEMPLATE + ending)
    async with cluster(tmp_path, reasoning_parser=parser) as c:
        for budget, tokens in ((7, 7), (0, 0), (-1, None), (None, None)):
            assert (await c.chat(thinking_token_budget=budget)).status_code == 200
            thinking = last_budget(c)
            assert (None if thinking is None else thinking.tokens) == tokens
            assert thinking is None or (thinking.start, thinking.end) == (start, "</think>")
        body = {"input": "hi", "thinking_token_budget": 4}
        assert (await c.client.post("/v1/responses", json=body)).status_code == 200
        thinking = last_budget(c)
        assert thinking is not None and thinking.tokens == 4


async def test_a_budget_ends_the_analysis_of_channels(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    async with cluster(tmp_path, **options) as c:
        assert (await c.chat(thinking_token_budget=3)).status_code == 200
        thinking = last_budget(c)
    assert thinking is not None
    assert (thinking.start, thinking.end) == ("<|channel|>analysis<|message|>", "<|end|>")


async def test_a_budget_needs_a_parser_of_the_reasoning(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        response = await c.chat(thinking_token_budget=3)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "thinking_token_budget"
        assert (await c.chat(thinking_token_budget=-1)).status_code == 200
    async with cluster(tmp_path / "parsed", reasoning_parser="qwen3") as c:
        response = await c.chat(thinking_token_budget=3, use_beam_search=True, n=2, temperature=0)
        assert "not available with 'use_beam_search'" in response.json()["error"]["message"]
