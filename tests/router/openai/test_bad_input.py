"""Invalid requests: the right status, at once, in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.in_process import CHAT, COMPLETIONS, HI, InProcess, tiny
from tandem.tests.router.openai.openai_errors import check
from tandem.tests.router.support import CONTEXT, cluster


def nested(levels: int) -> Any:
    """JSON as deep as Python's parser accepts."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


# What a schema does not show: more than the model has, and what does not go together. What a schema
# has not is in ``requests/test_refusals.py``, with the messages.
BAD: list[dict[str, Any]] = [
    {"n": 1_000_000},
    {"max_tokens": CONTEXT + 1},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"²": 1}},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [99999]},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
    {"prompt_logprobs": 99},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"best_of": 1, "n": 2},
    {"best_of": 2, "stream": True},
    {"best_of": 129},
    {"truncate_prompt_tokens": CONTEXT},
    {"stream": True, "stream_options": 1},
]
BAD_CHAT: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]},
    {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": nested(900)}]}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"documents": [{"title": 5}]},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"chat_template_kwargs": {"x": nested(70)}},
    {"chat_template_kwargs": {"x": nested(900)}},
    {"thinking_token_budget": 5},
]
BAD_COMPLETION: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": []},
    {"prompt": [""]},
    {"prompt": [[]]},
    {"prompt": [1, "a"]},
    {"prompt": [320]},
    {"prompt": [1] * (CONTEXT + 1)},
    {"prompt": ["x"] * 100_000},
    {"thinking_token_budget": 5},
    {"logprobs": 21},
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


def test_requests_that_make_no_sense(c: InProcess) -> None:
    chats, completions = [*BAD, *BAD_CHAT], [*BAD, *BAD_COMPLETION]
    for surface, valid, table in (
        (CHAT, {"messages": [HI]}, chats),
        (COMPLETIONS, {"prompt": "hi"}, completions),
    ):
        for fields in table:
            error = check(c.respond(surface, valid | fields), 400)
            assert error["type"] == "invalid_request_error", fields
    assert not c.node.requests
    assert c.chat().status_code == 200


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
