"""Invalid requests: the right status, at once, in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.in_process import CHAT, COMPLETIONS, InProcess, tiny
from tandem.tests.router.openai.openai_errors import check
from tandem.tests.router.support import CONTEXT, cluster

NAN, INF = float("nan"), float("inf")


def nested(levels: int) -> Any:
    """JSON as deep as Python's parser accepts."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


BAD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "warm"},
    {"temperature": True},
    {"temperature": []},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_k": 2**40},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"seed": 2**63},
    {"seed": -(2**63) - 1},
    {"seed": 1.5},
    {"seed": 10**400},
    {"temperature": 10**400},
    {"n": 0},
    {"n": 1_000_000},
    {"n": "2"},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 10**12},
    {"max_tokens": CONTEXT + 1},
    {"min_tokens": 30, "max_tokens": 20},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"²": 1}},
    {"logit_bias": []},
    {"stop": ""},
    {"stop": [""]},
    {"stop": [1]},
    {"stop": 5},
    {"stop": ["x"] * 1000},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [99999]},
    {"stop_token_ids": "1"},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": 1},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
    {"prompt_logprobs": 99},
    {"priority": 2**31},
    {"cache_salt": 5},
    {"cache_salt": "x" * 10_000},
    {"guided_regex": ["(a+)+"]},
    {"guided_json": 5},
    {"structured_outputs": {}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"best_of": 1, "n": 2},
    {"best_of": 2, "stream": True},
    {"best_of": 10_000},
    {"truncate_prompt_tokens": -2},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": CONTEXT},
    {"truncation_side": "middle"},
]
BAD_CHAT: list[dict[str, Any]] = [
    {"messages": None},
    {"messages": []},
    {"messages": "hi"},
    {"messages": [1]},
    {"messages": [{}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "", "content": "hi"}]},
    {"messages": [{"role": "king" * 64, "content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [{"name": 5}]},
    {"reasoning_effort": 5},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"documents": [{"title": 5}]},
    {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
    {"messages": [{"role": "assistant", "function_call": {"name": 5}}]},
    {"audio": {}},
    {"logprobs": 5},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"max_tokens": 5, "max_completion_tokens": 6},
    {"chat_template": "{{ 1 }}"},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": 3},
    {"chat_template_kwargs": {"x": nested(70)}},
    {"chat_template_kwargs": {"x": nested(900)}},
    {"messages": [{"role": "user", "content": [{"type": nested(900)}]}]},
    {"thinking_token_budget": 5},
    {"thinking_token_budget": -2},
    {"thinking_token_budget": "5"},
    {"model": 5},
]
BAD_COMPLETION: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [""]},
    {"prompt": [[]]},
    {"prompt": 5},
    {"prompt": {"a": 1}},
    {"prompt": [1, "a"]},
    {"prompt": ["a", 1]},
    {"prompt": [True]},
    {"prompt": [-1]},
    {"prompt": [320]},
    {"prompt": [1.5]},
    {"prompt": [[1], [10**30]]},
    {"prompt": [1] * (CONTEXT + 1)},
    {"prompt": [1] * CONTEXT},
    {"prompt": "word " * 2000},
    {"prompt": ["x"] * 100_000},
    {"prompt": ["x"] * 1000, "n": 100},
    {"suffix": "x"},
    {"suffix": 5},
    {"thinking_token_budget": 5},
    {"best_of": 129},
    {"logprobs": True},
    {"logprobs": 21},
    {"echo": 1},
    {"prompt": [1] * 400, "max_tokens": 1, "n": 128, "prompt_logprobs": 20},
    {"prompt": [1] * 100, "max_tokens": 400, "n": 128, "logprobs": 20},
    {"prompt": ["x"] * 512, "max_tokens": 500, "n": 8, "logprobs": 0},
    {
        "prompt": [[1] * 510] * 700,
        "max_tokens": 1,
        "n": 5,
        "stream": True,
        "echo": True,
        "logprobs": 1,
    },
    {"prompt": [1] * 400, "max_tokens": 1, "n": 128, "echo": True, "logprobs": 20},
    {"prompt": [[1] * 500] * 100, "max_tokens": 1, "prompt_logprobs": 20},
]


@pytest.fixture
def c() -> InProcess:
    return InProcess()


def test_parameters_out_of_range_or_of_the_wrong_type(c: InProcess) -> None:
    for fields in BAD_SAMPLING:
        error = check(c.chat(**fields), 400)
        assert error["type"] == "invalid_request_error", fields
        check(c.complete(**fields), 400)
    assert not c.node.requests
    assert c.chat().status_code == 200


def test_chats_that_make_no_sense(c: InProcess) -> None:
    for fields in BAD_CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}]} | fields
        check(c.respond(CHAT, body), 400)
    assert not c.node.requests


def test_completions_that_make_no_sense(c: InProcess) -> None:
    for fields in BAD_COMPLETION:
        body = {"prompt": "hi"} | fields
        check(c.respond(COMPLETIONS, body), 400)
    assert not c.node.requests


def test_the_context_limit_names_both_numbers(c: InProcess) -> None:
    error = check(c.complete([1] * 500, max_tokens=100), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"] and "600" in error["message"]
    error = check(c.chat("word " * 2000), 400)
    assert error["code"] == "context_length_exceeded"
    assert c.complete([1] * (CONTEXT - 1)).status_code == 200


def test_a_template_that_refuses_or_runs_away_is_the_requests_error() -> None:
    template = (
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) "
        "%}{% endfor %}{% endfor %}{% elif messages[0].content == 'reach' %}"
        "{{ ''.__class__.__mro__ }}{% else %}{{ raise_exception('users only') }}{% endif %}"
    )
    c = InProcess(tiny(template))
    assert "users only" in check(c.chat("x"), 400)["message"]
    check(c.chat("loop"), 400)
    check(c.chat("reach"), 400)


def test_no_template_sends_the_client_to_completions() -> None:
    c = InProcess(tiny(None))
    assert "/v1/completions" in check(c.chat("x"), 400)["message"]
    assert c.complete("x").status_code == 200


def test_the_models_own_defaults_are_used() -> None:
    c = InProcess(tiny(temperature=0.25, top_k=7))
    c.complete("x")
    c.complete("x", temperature=1, top_k=0)
    first, second = (request.sampling for request in c.node.requests)
    assert (first.temperature, first.top_k) == (0.25, 7)
    assert (second.temperature, second.top_k) == (1, 0)


def test_a_hopeless_prompt_is_not_even_encoded(c: InProcess) -> None:
    for answer in (c.complete("a" * 1_900_000), c.chat("a" * 1_900_000)):
        error = check(answer, 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"] and " 19000" in error["message"]


def test_all_that_a_template_may_show_counts(c: InProcess) -> None:
    long = "a" * 1_000_000
    hello = {"role": "user", "content": "hi"}
    for body in (
        {"messages": [hello | {"name": long}]},
        {"messages": [hello | {"reasoning_content": long}]},
        {"messages": [hello], "chat_template_kwargs": {"x": {"y": [long]}}},
        {"messages": [hello], "chat_template_kwargs": {long: 1}},
    ):
        error = check(c.respond(CHAT, body), 400)
        assert error["code"] == "context_length_exceeded", body.keys()
    assert not c.node.requests


async def test_the_tokenizer_for_quoted_control_tokens_exists_from_the_start(
    tmp_path: Path,
) -> None:
    """A second tokenizer reads it as text, and takes a while to create."""
    async with cluster(tmp_path) as c:
        assert c.router.registry.model().tokenizer._literal is not None
