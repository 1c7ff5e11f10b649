"""Invalid requests: the right status, at once, in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.router.surface import Surface
from tandem.tests.router.in_process import CHAT, COMPLETIONS, HI, InProcess, tiny
from tandem.tests.router.openai.openai_errors import check
from tandem.tests.router.support import CONTEXT, cluster


def nested(levels: int) -> Any:
    """JSON as deep as Python's parser accepts."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


# Values outside of the range or type of a field: of both surfaces, of chats, and of completions.
# ``requests/test_refusals.py`` has the messages, and tries many more against the document.
WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 2.1, "warm", True, [], 10**400),
    "top_p": (0, 1.5),
    "top_k": (-2, 1.5, 2**40),
    "min_p": (2,),
    "presence_penalty": (3,),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0,),
    "seed": (2**63, -(2**63) - 1, 1.5, 10**400),
    "n": (0, "2", 1_000_000),
    "best_of": (0, 129),
    "max_tokens": (-1, 0, 10**12, CONTEXT + 1),
    "logit_bias": ([], {"1": 101}, {"x": 1}, {"99999": 1}, {"-1": 1}, {"²": 1}),
    "stop": ("", [""], [1], 5, ["x"] * 1000),
    "stop_token_ids": ("1", [-1], [99999]),
    "stream": ("yes",),
    "prompt_logprobs": (99,),
    "priority": (2**31,),
    "cache_salt": (5, "x" * 10_000),
    "guided_regex": (["(a+)+"],),
    "guided_json": (5,),
    "structured_outputs": ({}, {"choice": []}, {"regex": "a", "choice": ["a"]}),
    "truncate_prompt_tokens": (-2, 0, CONTEXT),
    "truncation_side": ("middle",),
    "model": (5,),
    "response_format": (
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
    ),
}
WRONG_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "messages": (None, [], "hi", [1], [{}], [HI | {"role": ""}], [HI | {"role": "king" * 64}]),
    "tools": ([{"type": "function"}],),
    "functions": ([{"name": 5}],),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "reasoning_effort": (5,),
    "documents": ([{"title": 5}],),
    "logprobs": (5,),
    "top_logprobs": (2,),
    "chat_template": ("{{ 1 }}",),
    "chat_template_kwargs": (3, {"messages": []}, {"x": nested(70)}, {"x": nested(900)}),
    "thinking_token_budget": (5, -2, "5"),
    "audio": ({},),
}
WRONG_CONTENT: tuple[Any, ...] = (
    5,
    [],
    [{"type": "image_url"}],
    [{"type": "refusal", "text": "no"}],
    [{"type": nested(900)}],
)
WRONG_IN_COMPLETION: dict[str, tuple[Any, ...]] = {
    "prompt": (None, "", [], [""], [[]], 5, {"a": 1}, [1, "a"], ["a", 1], [True], [1.5], [-1],
               [320], [[1], [10**30]], [1] * CONTEXT, [1] * (CONTEXT + 1), "word " * 2000,
               ["x"] * 100_000),
    "suffix": ("x", 5),
    "logprobs": (True, 21),
    "echo": (1,),
    "thinking_token_budget": (5,),
}  # fmt: skip
# What does not go together.
BAD: list[dict[str, Any]] = [
    {"min_tokens": 30, "max_tokens": 20},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": 1},
    {"best_of": 1, "n": 2},
    {"best_of": 2, "stream": True},
]
BAD_CHAT: list[dict[str, Any]] = [
    {"continue_final_message": True, "add_generation_prompt": True},
    {"messages": [HI | {"tool_calls": [{"function": {"name": "f"}}]}]},
    {"messages": [{"role": "assistant", "function_call": {"name": 5}}]},
    {"logprobs": True, "top_logprobs": 21},
    {"max_tokens": 5, "max_completion_tokens": 6},
]
BAD_COMPLETION: list[dict[str, Any]] = [
    {"prompt": ["x"] * 1000, "n": 100},
    {"prompt": [1] * 400, "max_tokens": 1, "n": 128, "prompt_logprobs": 20},
    {"prompt": [1] * 100, "max_tokens": 400, "n": 128, "logprobs": 20},
    {"prompt": ["x"] * 512, "max_tokens": 500, "n": 8, "logprobs": 0},
    {"prompt": [[1] * 510] * 700, "max_tokens": 1, "n": 5, "stream": True, "echo": True,
     "logprobs": 1},
    {"prompt": [1] * 400, "max_tokens": 1, "n": 128, "echo": True, "logprobs": 20},
    {"prompt": [[1] * 500] * 100, "max_tokens": 1, "prompt_logprobs": 20},
]  # fmt: skip


def each(values: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [{name: value} for name, wrong in values.items() for value in wrong]


@pytest.fixture
def c() -> InProcess:
    return InProcess()


def test_requests_that_make_no_sense(c: InProcess) -> None:
    contents = [{"messages": [HI | {"content": content}]} for content in WRONG_CONTENT]
    both = [*each(WRONG), *BAD]
    tables: list[tuple[Surface, dict[str, Any], list[dict[str, Any]]]] = [
        (CHAT, {"messages": [HI]}, [*both, *each(WRONG_IN_CHAT), *contents, *BAD_CHAT]),
        (COMPLETIONS, {"prompt": "hi"}, [*both, *each(WRONG_IN_COMPLETION), *BAD_COMPLETION]),
    ]
    for surface, valid, table in tables:
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
    for response in (c.complete("a" * 1_900_000), c.chat("a" * 1_900_000)):
        error = check(response, 400)
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
