"""Tools by their former names, a part of them, and tools of a model whose template shows none."""

from __future__ import annotations

import json
from typing import Any

from tandem.router.requests.tool_text import with_tools_as_text
from tandem.tests.router.in_process import CHAT, MESSAGES, InProcess, tiny
from tandem.tests.router.openai.test_tools import (
    CALL,
    NOW,
    TEMPLATE,
    TWO_CALLS,
    WEATHER,
    streamed_calls,
    unary_calls,
)
from tandem.tests.router.support import events

ALLOWED = {"type": "allowed_tools"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return ALLOWED | {"allowed_tools": {"mode": mode, "tools": tools}}


def test_deprecated_functions_get_a_function_call() -> None:
    c = InProcess(tiny(TEMPLATE), reply=TWO_CALLS)
    functions = [WEATHER["function"], NOW["function"]]
    [choice] = c.chat(functions=functions).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    call = {"name": "weather", "arguments": '{"city": "Öl"}'}
    message = choice["message"]
    assert message["function_call"] == call and "tool_calls" not in message
    streamed = events(c.chat(functions=functions, stream=True).text)[:-1]
    deltas = [chunk["choices"][0]["delta"].get("function_call") for chunk in streamed]
    first, *others = [delta for delta in deltas if delta]
    assert first["name"] == "weather" and all("name" not in other for other in others)
    assert "".join(d["arguments"] for d in (first, *others)) == call["arguments"]
    c.node.reply = c.encode('{"city":"Ys"}')
    response = c.chat(functions=functions, function_call={"name": "weather"})
    assert response.json()["choices"][0]["message"]["function_call"]["arguments"] == '{"city":"Ys"}'
    result = {"role": "function", "name": "weather", "content": "warm"}
    history = [{"role": "user", "content": "hi"}, message, result]
    response = c.respond(CHAT, {"messages": history})
    assert response.status_code == 200, response.text
    assert "[weather]" in c.prompt() and "tool\nwarm" in c.prompt()


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"functions": [5]}, "functions[0]"),
    ({"functions": [{"name": 5}]}, "functions[0].name"),
    ({"functions": [NOW["function"]], "tools": [NOW]}, "functions"),
    ({"function_call": {"name": "now"}}, "function_call"),
    ({"functions": [NOW["function"]], "function_call": {"name": "x"}}, "function_call"),
    ({"functions": [NOW["function"]], "function_call": "required"}, "function_call"),
    ({"tools": [NOW], "tool_choice": ALLOWED}, "tool_choice.allowed_tools"),
    ({"tools": [NOW], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    (
        {"tools": [NOW], "tool_choice": allowed("auto", "x")},
        "tool_choice.allowed_tools.tools[0]",
    ),
    ({"tools": [NOW], "tool_choice": allowed("any", "now")}, "tool_choice.allowed_tools.mode"),
]


def test_wrong_fields_are_named() -> None:
    c = InProcess()
    for fields, param in INVALID:
        response = c.chat(**fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param and f"'{param}'" in error["message"]


def test_only_allowed_tools_are_shown_and_called() -> None:
    c = InProcess(tiny(TEMPLATE), reply=CALL)
    both = [WEATHER, NOW]
    response = c.chat(tools=both, tool_choice=allowed("auto", "weather"))
    assert unary_calls(response.json())[0] == [("weather", '{"city": "Öl"}')]
    assert '"weather"' in c.prompt() and '"now"' not in c.prompt()
    c.node.reply = c.encode('[{"name":"now","parameters":{}}]')
    response = c.chat(tools=both, tool_choice=allowed("required", "now"))
    assert unary_calls(response.json())[0] == [("now", "{}")]
    assert "weather" not in c.node.requests[-1].sampling.structured_outputs.json


def test_a_template_without_tools_gets_them_as_text() -> None:
    c = InProcess(reply=CALL, tool_call_parser="mistral")
    response = c.chat(tools=[WEATHER], stream=True)
    assert streamed_calls(response.text)[0] == [("weather", '{"city": "Öl"}')]
    assert '{"name": "weather", "description": "d"' in c.prompt()
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    count = c.post("/tokenize", **body).json()["tokens"]
    assert count == list(c.node.requests[-1].prompt)


def test_calls_and_results_become_messages_of_any_template() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "tool", "content": "s"},
        {"role": "user", "content": "b"},
    ]
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    converted, tools = with_tools_as_text(messages, [tool], "")
    assert tools is None and [message["role"] for message in converted] == [
        "user",
        "assistant",
        "user",
    ]
    assert converted[0]["content"].endswith("\n\na") and '{"name": "f"}' in converted[0]["content"]
    assert converted[1]["content"].count('{"name": "f", "arguments": {"x": 1}}\n</tool_call>') == 2
    assert converted[2]["content"] == (
        "<tool_response>\nr\n</tool_response>\n<tool_response>\ns\n</tool_response>\nb"
    )
    with_system, _ = with_tools_as_text([{"role": "system", "content": "s"}, *messages], [tool], "")
    assert with_system[0]["content"].startswith("s\n\n") and with_system[1]["content"] == "a"
    assert with_tools_as_text(messages, [tool], "tools tool_calls 'tool'") == (messages, [tool])


def test_strict_schemas_are_followed_unless_the_format_cannot() -> None:
    city = {"type": "string", "pattern": "x"}
    strict = {"name": "weather", "strict": True, "parameters": {"properties": {"city": city}}}
    tools = [NOW, {"type": "function", "function": strict}]
    c = InProcess(tiny(TEMPLATE), reply=TWO_CALLS)
    assert c.chat(tools=tools).status_code == 200
    constraint = c.node.requests[-1].sampling.structured_outputs
    assert constraint.param == "tools[1].function.parameters"
    assert json.loads(constraint.tool_calls)["schemas"]["weather"] == strict["parameters"]
    assert c.chat(tools=[NOW]).status_code == 200
    assert not c.node.requests[-1].sampling.HasField("structured_outputs")
    tool = {"name": "weather", "strict": True, "input_schema": strict["parameters"]}
    fields = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    c.respond(MESSAGES, {"model": "tiny"} | fields)
    assert c.node.requests[-1].sampling.structured_outputs.param == "tools.0.input_schema"
    c = InProcess(tiny(TEMPLATE), tool_call_parser="qwen3_xml")
    rejection = c.chat(tools=tools)
    assert rejection.status_code == 400 and "'qwen3_xml'" in rejection.json()["error"]["message"]
    assert rejection.json()["error"]["param"] == "tools[1].function.parameters"
    required = c.chat(tools=tools, tool_choice="required")
    assert required.status_code == 200 and c.node.requests[-1].sampling.structured_outputs.json


def test_models_that_write_channels_make_forced_calls() -> None:
    c = InProcess(tiny(TEMPLATE), tool_call_parser="openai", reasoning_parser="openai_gptoss")
    c.node.reply = c.encode(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.now <|constrain|>json<|message|>{}"
    )
    forced_choice = {"type": "function", "function": {"name": "now"}}
    for choice, names in (("required", ["weather", "now"]), (forced_choice, ["now"])):
        response = c.chat(tools=[WEATHER, NOW], tool_choice=choice)
        [call] = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}
        schema = json.loads(c.node.requests[-1].sampling.structured_outputs.tool_calls)
        assert schema["channels"]["required"]
        assert [call["name"] for call in schema["channels"]["calls"]] == names
