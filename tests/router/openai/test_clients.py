"""Clients written for OpenAI and vLLM: the fields that they send and read."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tandem.router.handler import MAX_NAMED_FIELDS
from tandem.tests.router.in_process import CHAT, InProcess, tiny

# A template that shows tool calls and thinking, as those of Qwen3 and others do.
TOOLS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}result of {{ m.tool_call_id }}: {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments.x }})]"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }} {{ reasoning_effort }}{% endif %}"
    "{{ verbosity }}"
)

NULLS: dict[str, Any] = dict.fromkeys(
    (
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "logit_bias",
        "stream_options",
        "response_format",
        "stop",
        "seed",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "user",
        "metadata",
        "store",
        "service_tier",
        "reasoning_effort",
        "parallel_tool_calls",
        "audio",
        "prediction",
        "modalities",
    )
)
ACCEPTED: dict[str, dict[str, Any]] = {
    "nulls": NULLS,
    "no tools": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    "tool_choice none": {"tool_choice": "none"},
    "text": {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"},
    "accounting": {"store": True, "service_tier": "flex", "user": "u", "metadata": {"a": "b"}},
    "llama.cpp": {"cache_prompt": True, "mirostat": 0, "repeat_penalty": 1.1},
    "litellm": {"drop_params": True, "extra_body": {"x": 1}},
    "open webui": {"stream": True, "stream_options": {"include_usage": True}, "chat_id": "1"},
    "obfuscation": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "stream_options": {"stream": False, "stream_options": {}},
    "vllm": {"request_id": "r", "session_id": "s", "stream_interval": 4, "top_logprobs": 0},
    "floats": {"max_tokens": 5.0, "top_k": 40.0, "n": 1.0, "seed": 7.0},
    "effort": {"reasoning_effort": "low"},
}


@pytest.fixture
def c() -> InProcess:
    return InProcess()


def test_fields_without_effect_are_accepted(c: InProcess) -> None:
    for case, fields in ACCEPTED.items():
        response = c.chat(**fields)
        assert response.status_code == 200, (case, response.text)
    completion = {name: value for name, value in NULLS.items() if name != "top_logprobs"}
    assert c.complete(**completion).status_code == 200
    assert c.complete(cache_prompt=True, suffix=None).status_code == 200


def test_an_unknown_field_is_logged_once(c: InProcess, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if "unknown and ignored" in r.getMessage()]

    message = {"role": "user", "content": "hi", "id": 5}
    for _ in range(3):
        response = c.respond(CHAT, {"messages": [message], "tempreature": 1})
        assert response.status_code == 200
    assert len(warnings()) == 2
    assert "'messages[].id'" in warnings()[0] and "'tempreature'" in warnings()[1]
    assert all(r.levelno == logging.WARNING for r in caplog.records if "ignored" in r.message)
    for number in range(2 * MAX_NAMED_FIELDS):
        c.complete(**{f"x{number}": 1, "y" * 100_000: 2})
    assert len(warnings()) == MAX_NAMED_FIELDS and max(map(len, warnings())) < 200


def test_an_assistants_empty_content_is_an_empty_text(c: InProcess) -> None:
    hello = {"role": "user", "content": "hi"}
    expected = c.encode(
        "<|start|>assistant\n<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    )
    # A reply of ours that the client sends back with all its fields.
    silents: list[dict[str, Any]] = [
        {"content": None},
        {},
        {"content": None, "refusal": None, "tool_calls": []},
    ]
    for silent in silents:
        messages = [{"role": "assistant"} | silent, hello]
        response = c.respond(CHAT, {"messages": messages})
        assert response.status_code == 200, response.text
        assert list(c.node.requests[-1].prompt) == expected


def test_tool_calls_of_the_history_go_to_a_template_that_shows_them() -> None:
    function = {"name": "f", "arguments": json.dumps({"x": 3})}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    c = InProcess(tiny(TOOLS))
    response = c.respond(
        CHAT,
        {"messages": messages, "reasoning_effort": "none", "verbosity": "low"},
    )
    assert response.status_code == 200, response.text
    assert "[f(3)]" in c.prompt() and "result of 1: r" in c.prompt()
    assert c.prompt().endswith("False nonelow")


def test_the_openai_client_finds_vllms_fields(c: InProcess) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    options: Any = {"extra_body": {"prompt_logprobs": 1, "return_token_ids": True}}
    client = c.openai()
    chat: Any = client.chat.completions.create(model="tiny", messages=messages, **options)
    ids = list(c.node.requests[-1].prompt)
    assert chat.prompt_token_ids == ids and len(chat.prompt_logprobs) == len(ids)
    assert chat.prompt_logprobs[0] is None
    assert chat.prompt_logprobs[1][str(ids[1])]["decoded_token"]
    assert chat.choices[0].token_ids == [*c.node.reply, 0]
    text: Any = client.completions.create(model="tiny", prompt=["a", "hi"], **options)
    # The prompts of a request are on their way side by side.
    requests = sorted(c.node.requests[-2:], key=lambda request: request.request_id)
    for choice, request in zip(text.choices, requests, strict=True):
        ids = list(request.prompt)
        assert choice.prompt_token_ids == ids and len(choice.prompt_logprobs) == len(ids)
        assert choice.token_ids == [*c.node.reply, 0]
    # Null unless requested, as in vLLM, whose clients read them without a test.
    chat = client.chat.completions.create(model="tiny", messages=messages)
    assert chat.prompt_logprobs is chat.prompt_token_ids is chat.choices[0].token_ids is None
    text = client.completions.create(model="tiny", prompt="hi")
    choice = text.choices[0]
    assert choice.prompt_logprobs is choice.prompt_token_ids is choice.token_ids is None


def test_the_openai_client_can_send_replies_back(c: InProcess) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    client = c.openai()
    for _ in range(2):
        completion = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[],
            tool_choice="none",
            logit_bias=None,
            response_format={"type": "text"},
        )
        message = completion.choices[0].message
        messages += [message.model_dump(), message, {"role": "user", "content": "more"}]
    assert len(c.node.requests) == 2
