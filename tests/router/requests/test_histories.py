"""Conversations as clients send them again: the same prompt on every surface, whatever the chat
template takes, and no call of the model's that ends one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tandem.router.requests import call_arguments
from tandem.tests.router.in_process import load_tokenizer, tiny
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import make_model
from tandem.tests.shared.text.test_dialect import CHECK, GEMMA, IDS, LATE, ONLY_FIRST, PLAIN, TEXT

CHAT, RESPONSES, MESSAGES, OLLAMA = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"),
)
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "one"},
    {"role": "system", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "system", "content": "four"},
]


def post(c: InProcessResponses, path: str, **body: Any) -> Any:
    response = c.post(path, **{"model": "tiny", "stream": False, **body})
    assert response.status_code == 200, (path, response.text)
    return response.json()


def prompts_of(c: InProcessResponses, messages: list[dict[str, Any]]) -> dict[str, str]:
    """The prompt of each surface; instructions of a response are its first message."""
    first, *others = messages
    instructions = first["content"] if first["role"] == "system" else None
    input_ = others if instructions else messages
    developers = [{**m, "role": m["role"].replace("system", "developer")} for m in input_]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": messages, "max_tokens": 2}),
        (RESPONSES, {"instructions": instructions, "input": developers, "max_output_tokens": 2}),
        (MESSAGES, {"messages": messages, "max_tokens": 2}),
        (OLLAMA, {"messages": messages}),
    ]
    prompts = {}
    for path, body in bodies:
        post(c, path, **body)
        prompts[path] = c.prompt()
    tokens = post(c, "/tokenize", messages=messages)["tokens"]
    prompts["/tokenize"] = c.tokenizer.decode(tokens)
    count = post(c, "/v1/messages/count_tokens", messages=messages)
    assert count["input_tokens"] == len(c.node.requests[2].prompt)
    return prompts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LATE, "system=one{0}two\nuser=three{0}four\n"),
        (ONLY_FIRST, "system=one{0}two\nuser=three{0}four\n"),
        (GEMMA, "user=one{0}two{0}three{0}four\n"),
    ],
)
def test_system_messages_are_folded_on_every_surface(template: str, expected: str) -> None:
    with InProcessResponses(tiny(template)) as c:
        for path, text in prompts_of(c, CONVERSATION).items():
            # Anthropic's conversations join the messages in front, whichever the template is.
            normalized = text.replace("one\ntwo", "one\n\ntwo")
            assert normalized == expected.format("\n\n"), path


def test_system_messages_stay_where_the_template_takes_them() -> None:
    with InProcessResponses(tiny(PLAIN)) as c:
        for path, text in prompts_of(c, CONVERSATION[1:]).items():
            assert text == "system=two\nuser=three\nsystem=four\n", path


EMPTY: tuple[Any, ...] = ("", None, "{}")
BROKEN: tuple[Any, ...] = (
    '{"s": "x',
    '{"s":"x"} trailing',
    '{"s":"a\nb"}',
    "  ",
    "[1]",
    "5",
    '"x"',
    "null",
    "true",
    '{"a": ' * 100 + "1" + "}" * 100,
    [1],
    5,
    True,
)


def history(arguments: Any) -> dict[str, list[dict[str, Any]]]:
    """A tool call with its result, by the paths whose bodies have it."""
    function = {"name": "f", "arguments": arguments}
    user, result = {"role": "user", "content": "go"}, {"role": "tool", "content": "r"}
    call = {"id": "call_1", "type": "function", "function": function}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    former = {"role": "assistant", "content": None, "function_call": function}
    block = {"type": "tool_use", "id": "call_1", "name": "f", "input": arguments}
    tool_result = {"type": "tool_result", "tool_use_id": "call_1", "content": "r"}
    tool_call = {"type": "function_call", "call_id": "call_1"} | function
    output = {"type": "function_call_output", "call_id": "call_1", "output": "r"}
    return {
        CHAT: [user, calling, result | {"tool_call_id": "call_1"}],
        f"{CHAT}?former": [user, former, {"role": "function", "name": "f", "content": "r"}],
        RESPONSES: [user, tool_call, output],
        MESSAGES: [
            user,
            {"role": "assistant", "content": [block]},
            user | {"content": [tool_result]},
        ],
        OLLAMA: [user, {**calling, "content": ""}, result | {"tool_name": "f"}],
    }


@pytest.mark.parametrize(
    "template", [PLAIN, TEXT, "{{ messages | map(attribute='content') | join }}"]
)
def test_arguments_that_are_no_object_never_end_a_conversation(
    template: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_arguments.log, "filters", [])
    caplog.set_level(logging.WARNING, "tandem")
    with InProcessResponses(tiny(template)) as c:
        for path in history({}):
            expected = rendered(c, path, {})
            for empty in EMPTY:
                assert rendered(c, path, empty) == expected
            assert not caplog.records
            for broken in BROKEN:
                assert rendered(c, path, broken) == expected
                [line] = caplog.records
                assert "not a JSON object" in line.getMessage()
                caplog.clear()
            good = rendered(c, path, {"s": "x"})
            assert good == expected.replace("{}", '{"s": "x"}')


def rendered(c: InProcessResponses, path: str, arguments: Any) -> str:
    name = "input" if path == RESPONSES else "messages"
    limit = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}.get(path)
    body = {name: history(arguments)[path], **({limit: 2} if limit else {})}
    post(c, path.partition("?")[0], **body)
    return c.prompt()


def test_ids_of_other_servers_and_none_reach_templates_that_are_strict() -> None:
    with InProcessResponses(tiny(CHECK + "{% endmacro %}" + IDS)) as c:
        texts = {path: rendered(c, path, "{}") for path in history({})}
    for path, text in texts.items():
        first, second = (part.split(">")[0] for part in text.split("<")[1:])
        assert first == second and len(first) == 9, path


def test_chats_with_tools_have_the_template_for_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "plain {{ messages[0].content }}")
    template = "tools {{ tools | map(attribute='function.name') | join }}<tool_call>"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "hi"}]
    with InProcessResponses(load_tokenizer(folder)) as c:
        post(c, CHAT, messages=messages)
        assert c.prompt() == "plain hi"
        c.node.reply = c.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
        response = post(c, CHAT, messages=messages, tools=[tool])
        assert c.prompt() == "tools f<tool_call>"
        assert response["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        tokens = post(c, "/tokenize", messages=messages, tools=[tool])["tokens"]
        assert tokens == list(c.node.requests[-1].prompt)
        about = post(c, "/api/show")
        assert about["template"].startswith("plain") and "tools" in about["capabilities"]
