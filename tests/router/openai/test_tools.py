"""Tools in chat completions, against a fake decode node."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.support import events

TEMPLATE = (
    "{% for t in tools or [] %}<tool_call> {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|end|>\n{% endfor %}"
    "{% if 'tool' == 'x' %}{% endif %}<|start|>assistant\n"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Öl"}}\n</tool_call>'
TWO_CALLS = f"I look.\n{CALL}\n{CALL.replace('Öl', 'Ys')}"


@pytest.fixture
def c() -> InProcess:
    return InProcess(tiny(TEMPLATE), reply=TWO_CALLS)


def test_tool_calls_have_openais_shape(c: InProcess) -> None:
    [choice] = c.chat(tools=[WEATHER, NOW]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        '{"city": "Öl"}',
        '{"city": "Ys"}',
    ]
    first, second = message["tool_calls"]
    assert first["id"] != second["id"] and first["id"].startswith("call_")
    assert first["type"] == "function" and first["function"]["name"] == "weather"
    definition = {"name": "weather", "description": "d", "parameters": PARAMETERS}
    assert json.dumps({"type": "function", "function": definition}) in c.prompt()


@pytest.mark.parametrize("chunk", [1, 4, 500])
def test_streamed_calls_add_up_to_the_unary_ones(c: InProcess, chunk: int) -> None:
    c.node.chunk = chunk
    fields: dict[str, Any] = {"tools": [WEATHER], "n": 2}
    whole = c.chat(**fields).json()["choices"]
    chunks = events(c.chat(stream=True, **fields).text)[:-1]
    for choice in whole:
        mine = [x["choices"][0] for x in chunks if x["choices"][0]["index"] == choice["index"]]
        assert [x["finish_reason"] for x in mine if x["finish_reason"]] == ["tool_calls"]
        text = "".join(x["delta"].get("content", "") for x in mine)
        assert text == choice["message"]["content"]
        calls: list[dict[str, Any]] = []
        for delta in (call for x in mine for call in x["delta"].get("tool_calls", ())):
            if delta["index"] == len(calls):
                assert delta["id"].startswith("call_") and delta["type"] == "function"
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            else:
                assert delta.keys() == {"index", "function"}
                assert delta["function"].keys() == {"arguments"}
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
        assert calls == [call["function"] for call in choice["message"]["tool_calls"]]


def test_the_openai_clients_stream_helper_collects_calls() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    tools: Any = [WEATHER | {"function": WEATHER["function"] | {"parameters": _strict()}}]
    c = InProcess(tiny(TEMPLATE), reply=TWO_CALLS)
    client = c.openai()
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == [
        {"city": "Öl"},
        {"city": "Ys"},
    ]
    # The reply goes back with the results.
    messages += [final.choices[0].message]
    messages += [{"role": "tool", "tool_call_id": x.id, "content": "warm"} for x in calls]
    client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    assert "[weather][weather]" in c.prompt() and "tool\nwarm" in c.prompt()


def _strict() -> dict[str, Any]:
    return PARAMETERS | {"required": ["city"], "additionalProperties": False}


def test_parallel_tool_calls_can_be_disabled(c: InProcess) -> None:
    response = c.chat(tools=[WEATHER], parallel_tool_calls=False)
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Öl"}


def test_tool_calls_are_text_without_tools(c: InProcess) -> None:
    bodies: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": [NOW], "tool_choice": "none"}]
    for fields in bodies:
        [choice] = c.chat(**fields).json()["choices"]
        assert choice["message"]["content"] == TWO_CALLS
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert '"now"' in c.prompt()  # as in vLLM


def test_a_truncated_call_has_partial_arguments_and_finish_reason_length(c: InProcess) -> None:
    tokens = len(c.encode(CALL[: CALL.index("Öl")]))
    c.node.reply = c.encode(CALL)
    [choice] = c.chat(tools=[WEATHER], max_tokens=tokens).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith('{"city"')


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("reply", "choice"),
    [(" {", NAMED), ("1", NAMED), ('[{"name":"weather","parameters":{"', "required")],
)
def test_a_call_cut_off_before_its_arguments_is_dropped(
    c: InProcess, reply: str, choice: Any
) -> None:
    c.node.reply = c.encode(reply)
    limit = max(1, len(c.node.reply) - 2)
    response = c.chat(tools=[WEATHER], tool_choice=choice, max_tokens=limit)
    [first] = response.json()["choices"]
    assert (first["finish_reason"], first["message"].get("tool_calls")) == ("length", None)


REQUIRED = '[{"name":"weather","parameters":{"city":"Öl"}}, {"name":"now","parameters":{}}]'


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_the_output(c: InProcess, stream: bool) -> None:
    c.node.reply, c.node.chunk = c.encode(REQUIRED), 3
    response = c.chat(tools=[WEATHER, NOW], tool_choice="required", stream=stream)
    calls, reason = streamed_calls(response.text) if stream else unary_calls(response.json())
    assert calls == [("weather", '{"city":"Öl"}'), ("now", "{}")] and reason == "tool_calls"
    schema = json.loads(c.node.requests[-1].sampling.structured_outputs.json)
    jsonschema.validate(json.loads(REQUIRED), schema)
    for wrong in ([], [{"name": "weather", "parameters": {"city": 5}}], [{"name": "then"}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called(c: InProcess, stream: bool) -> None:
    c.node.reply, c.node.chunk = c.encode('{"city":"Ys"}'), 3
    choice = {"type": "function", "function": {"name": "weather"}}
    response = c.chat(
        tools=[NOW, WEATHER], tool_choice=choice, stream=stream, response_format={"type": "text"}
    )
    calls, reason = streamed_calls(response.text) if stream else unary_calls(response.json())
    assert calls == [("weather", '{"city":"Ys"}')] and reason == "stop"
    assert json.loads(c.node.requests[-1].sampling.structured_outputs.json) == PARAMETERS


def unary_calls(body: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
    [choice] = body["choices"]
    assert not choice["message"]["content"]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(one["name"], one["arguments"]) for one in functions], choice["finish_reason"]


def streamed_calls(text: str) -> tuple[list[tuple[str, str]], str]:
    calls: list[tuple[str, str]] = []
    choices = [chunk["choices"][0] for chunk in events(text)[:-1]]
    for delta in (call for one in choices for call in one["delta"].get("tool_calls", ())):
        if "id" in delta:
            calls.append((delta["function"]["name"], ""))
        name, arguments = calls[delta["index"]]
        calls[delta["index"]] = name, arguments + delta["function"]["arguments"]
    [reason] = [one["finish_reason"] for one in choices if one["finish_reason"]]
    return calls, reason


def test_required_calls_have_their_own_definitions(c: InProcess) -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {
            "$schema": "s",
            "$id": "i",
            "properties": {"at": {"$ref": "#/$defs/Place"}},
            "$defs": {"Place": {"type": kind}},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    c.node.reply = c.encode('[{"name":"g","parameters":{"at":5}}]')
    both = [tool("f", "string"), tool("g", "number")]
    response = c.chat(tools=both, tool_choice="required", parallel_tool_calls=False)
    assert unary_calls(response.json())[0] == [("g", '{"at":5}')]
    schema = json.loads(c.node.requests[-1].sampling.structured_outputs.json)
    assert schema["maxItems"] == 1
    first, second = (call["properties"]["parameters"] for call in schema["items"]["anyOf"])
    assert first["$id"] != second["$id"] and "$schema" not in first
    assert second["$defs"] == {"Place": {"type": "number"}}


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"tools": [5]}, "tools[0]"),
    "no type": ({"tools": [{}]}, "tools[0].type"),
    "custom": ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "empty name": ({"tools": [NOW | {"function": {"name": ""}}]}, "tools[0].function.name"),
    "strange name": ({"tools": [NOW | {"function": {"name": 'a"b'}}]}, "tools[0].function.name"),
    "parameters": (
        {"tools": [NOW | {"function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    "twice": ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    "too many": ({"tools": [NOW] * 1025}, "tools"),
    "no array": ({"tools": {}}, "tools"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "unknown choice": ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    "choice of another kind": ({"tools": [NOW], "tool_choice": 5}, "tool_choice"),
    "unknown function": (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
}


def test_invalid_tools_are_rejected_by_name(c: InProcess) -> None:
    for case, (fields, param) in INVALID.items():
        response = c.chat(**fields)
        assert response.status_code == 400, (case, response.text)
        assert response.json()["error"]["param"] == param, (case, response.text)
    assert c.node.requests == []


def test_automatic_choice_can_be_switched_off() -> None:
    c = InProcess(tiny(TEMPLATE), enable_auto_tool_choice=False)
    response = c.chat(tools=[NOW])
    assert response.status_code == 400
    assert "--enable-auto-tool-choice" in response.json()["error"]["message"]
    assert c.chat(tools=[NOW], tool_choice="none").status_code == 200


def test_tokenize_counts_tools(c: InProcess) -> None:
    c.chat("hi", tools=[NOW])
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [NOW]}
    response = c.post("/tokenize", **body).json()
    assert response["tokens"] == list(c.node.requests[-1].prompt)


def test_special_tokens_reach_the_parser_that_needs_them() -> None:
    """<|end|> is a special token of the tokenizer, and a marker of harmony."""
    options: dict[str, Any] = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    c = InProcess(tiny(TEMPLATE), **options)
    c.node.reply = c.encode(
        "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Ys"}'
    )
    assert {0, 1} < set(c.node.reply)
    message = c.chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think", None)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Ys"}'
    # Without tools the call is text, and without a parser special tokens are not.
    message = c.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I think", '{"city": "Ys"}')


def test_a_prompt_that_ends_the_reasoning_has_content_only() -> None:
    c = InProcess(
        tiny(TEMPLATE + "<think>\n{% if enable_thinking == false %}\n</think>\n\n{% endif %}"),
        reasoning_parser="auto",
    )
    c.node.reply = c.encode("a</think>b")
    message = c.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", "b")
    c.node.reply = c.encode("a")
    message = c.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "a")


def test_a_call_in_the_reasoning_counts_but_prose_about_it_does_not() -> None:
    c = InProcess(tiny(TEMPLATE + "<think>\n", special=("<tool_call>",)), reasoning_parser="qwen3")
    prose = c.tokenizer.encode("I write <tool_call>. ", add_special_tokens=False, literally=True)
    c.node.reply = [*prose, *c.encode(f"{CALL}</think>")]
    options: dict[str, Any] = {"tools": [WEATHER], "thinking_token_budget": 50}
    [choice] = c.chat(**options).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("I write <tool_call>. ", None)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Öl"}'
    assert c.node.requests[-1].sampling.thinking.calls == ["<tool_call>"]
    calls, reason = streamed_calls(c.chat(stream=True, **options).text)
    assert calls == [("weather", '{"city": "Öl"}')] and reason == "tool_calls"
    # Without tools there is no call, and with a forced one no marker.
    for fields in ({}, {"tools": [WEATHER], "tool_choice": NAMED}):
        assert c.chat(thinking_token_budget=50, **fields).status_code == 200
        assert c.node.requests[-1].sampling.thinking.calls == []
