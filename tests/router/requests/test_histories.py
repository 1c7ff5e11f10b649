"""Conversations that clients send again: every API builds the same prompt, whatever the chat
template supports, and invalid tool calls of the model do not break a conversation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tandem.router.requests import call_arguments
from tandem.tests.router.support import Cluster, cluster, make_model
from tandem.tests.shared.text.test_dialect import CHECK, GEMMA, IDS, LATE, ONLY_FIRST, PLAIN, TEXT

CHAT, RESPONSES, MESSAGES, OLLAMA = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"),
)
COUNTED = {"chat": "/tokenize", "messages": "/v1/messages/count_tokens"}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "one"},
    {"role": "system", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "system", "content": "four"},
]


async def post(c: Cluster, path: str, **body: Any) -> Any:
    response = await c.client.post(path, json={"model": "tiny", "stream": False, **body})
    assert response.status_code == 200, (path, response.text)
    return response.json()


async def prompts_of(c: Cluster, messages: list[dict[str, Any]]) -> dict[str, str]:
    """The prompt by path. The first message becomes the instructions of a response."""
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
        await post(c, path, **body)
        prompts[path] = c.prompt()
    tokens = (await post(c, "/tokenize", messages=messages))["tokens"]
    prompts["/tokenize"] = c.router.registry.model().tokenizer.decode(tokens)
    counted = await post(c, "/v1/messages/count_tokens", messages=messages)
    assert counted["input_tokens"] == len(c.node.requests[2].prompt)
    return prompts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LATE, "system=one{0}two\nuser=three{0}four\n"),
        (ONLY_FIRST, "system=one{0}two\nuser=three{0}four\n"),
        (GEMMA, "user=one{0}two{0}three{0}four\n"),
    ],
)
async def test_system_messages_are_folded_on_every_surface(
    tmp_path: Path, template: str, expected: str
) -> None:
    make_model(tmp_path / "model", template)
    async with cluster(tmp_path) as c:
        for path, prompt in (await prompts_of(c, HISTORY)).items():
            # Anthropic's API joins the messages before the first user message for any template.
            joined = prompt.replace("one\ntwo", "one\n\ntwo")
            assert joined == expected.format("\n\n"), path


async def test_system_messages_stay_where_the_template_takes_them(tmp_path: Path) -> None:
    make_model(tmp_path / "model", PLAIN)
    async with cluster(tmp_path) as c:
        for path, prompt in (await prompts_of(c, HISTORY[1:])).items():
            assert prompt == "system=two\nuser=three\nsystem=four\n", path


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
    """Bodies with a tool call and its result, by path."""
    function = {"name": "f", "arguments": arguments}
    user, result = {"role": "user", "content": "go"}, {"role": "tool", "content": "r"}
    call = {"id": "call_1", "type": "function", "function": function}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    former = {"role": "assistant", "content": None, "function_call": function}
    block = {"type": "tool_use", "id": "call_1", "name": "f", "input": arguments}
    response = {"type": "tool_result", "tool_use_id": "call_1", "content": "r"}
    called = {"type": "function_call", "call_id": "call_1"} | function
    output = {"type": "function_call_output", "call_id": "call_1", "output": "r"}
    return {
        CHAT: [user, calling, result | {"tool_call_id": "call_1"}],
        f"{CHAT}?former": [user, former, {"role": "function", "name": "f", "content": "r"}],
        RESPONSES: [user, called, output],
        MESSAGES: [user, {"role": "assistant", "content": [block]}, user | {"content": [response]}],
        OLLAMA: [user, {**calling, "content": ""}, result | {"tool_name": "f"}],
    }


@pytest.mark.parametrize(
    "template", [PLAIN, TEXT, "{{ messages | map(attribute='content') | join }}"]
)
async def test_arguments_that_are_no_object_never_end_a_conversation(
    tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", template)
    monkeypatch.setattr(call_arguments.log, "filters", [])
    caplog.set_level(logging.WARNING, "tandem")
    async with cluster(tmp_path) as c:
        for path in history({}):
            expected = await _sent_arguments(c, path, {})
            for empty in EMPTY:
                assert await _sent_arguments(c, path, empty) == expected
            assert not caplog.records
            for broken in BROKEN:
                assert await _sent_arguments(c, path, broken) == expected
                [line] = caplog.records
                assert "not a JSON object" in line.getMessage()
                caplog.clear()
            good = await _sent_arguments(c, path, {"s": "x"})
            assert good == expected.replace("{}", '{"s": "x"}')


async def _sent_arguments(c: Cluster, path: str, arguments: Any) -> str:
    name = "input" if path == RESPONSES else "messages"
    limit = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}.get(path)
    body = {name: history(arguments)[path], **({limit: 2} if limit else {})}
    await post(c, path.partition("?")[0], **body)
    return c.prompt()


async def test_ids_of_other_servers_and_none_reach_templates_that_are_strict(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model", CHECK + "{% endmacro %}" + IDS)
    async with cluster(tmp_path) as c:
        prompts = {path: await _sent_arguments(c, path, "{}") for path in history({})}
    for path, text in prompts.items():
        first, second = (part.split(">")[0] for part in text.split("<")[1:])
        assert first == second and len(first) == 9, path


async def test_chats_with_tools_have_the_template_for_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "plain {{ messages[0].content }}")
    template = "tools {{ tools | map(attribute='function.name') | join }}<tool_call>"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "hi"}]
    async with cluster(tmp_path) as c:
        await post(c, CHAT, messages=messages)
        assert c.prompt() == "plain hi"
        c.node.reply = c.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
        response = await post(c, CHAT, messages=messages, tools=[tool])
        assert c.prompt() == "tools f<tool_call>"
        assert response["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        tokens = (await post(c, "/tokenize", messages=messages, tools=[tool]))["tokens"]
        assert tokens == list(c.node.requests[-1].prompt)
        about = await post(c, "/api/show")
        assert about["template"].startswith("plain") and "tools" in about["capabilities"]
