"""Reasoning within a budget, token by token."""

from __future__ import annotations

import pytest

from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.thinking_budget import (
    ThinkingBudget,
    ThinkingLimit,
    ThinkingRule,
)
from tandem.shared.errors import RequestError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import make_model

CALL = '<tool_call>{"name": "f", "arguments": {"s": "<think> a"}}</tool_call>'


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    folder = make_model(tmp_path_factory.mktemp("model"), special=["<tool_call>", "</tool_call>"])
    files = read_tokenizer_files(folder)
    return LLGuidanceBackend(files, 1 + max(files.vocabulary().values()), [0])


def forced_after(backend: LLGuidanceBackend, budget: ThinkingBudget, text: str) -> list[int]:
    """The places at which a token is forced in an output that is written in any case."""
    limit = ThinkingLimit(ThinkingRule(budget, backend))
    places = []
    for place, token in enumerate(backend.encode(text)):
        if limit.forced() is not None:
            limit.reject_forced()
            places.append(place)
        limit.advance([token])
    return places


@pytest.mark.parametrize("start", ["", "<think>"])
def test_a_call_ends_a_reasoning_before_its_budget_does(
    backend: LLGuidanceBackend, start: str
) -> None:
    budget = ThinkingBudget(tokens=8, start=start, calls=("<tool_call>", "<function="))
    assert forced_after(backend, budget, f"{start}ab{CALL} and more") == []
    # A marker of several tokens is text, and a call after the budget is too late.
    tokens = len(backend.encode(f"{start}<function=")) + 8
    assert forced_after(backend, budget, f"{start}<function={'x' * 40}")[0] <= tokens
    assert forced_after(backend, budget, f"{start}{'x ' * 20}{CALL}")


def test_a_reasoning_does_not_begin_in_a_call(backend: LLGuidanceBackend) -> None:
    marked = ThinkingBudget(tokens=0, calls=("<tool_call>",))
    assert forced_after(backend, marked, CALL) == []
    assert forced_after(backend, ThinkingBudget(tokens=0), CALL)


def test_a_router_cannot_send_any_number_of_markers() -> None:
    with pytest.raises(RequestError, match="at most 16 markers of calls"):
        ThinkingBudget(tokens=1, calls=("x",) * 17).check()
    with pytest.raises(RequestError, match="at most 256 characters"):
        ThinkingBudget(tokens=1, calls=("x" * 300,)).check()
