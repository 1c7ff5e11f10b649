"""Tools, formats, logprobs and reasoning of responses, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tandem.router.responses.chat_turns import as_messages
from tandem.router.responses.input_items import read_input
from tandem.router.responses.tools import custom_input
from tandem.tests.router.in_process import tiny
from tandem.tests.router.in_process_responses import openai_client
from tandem.tests.router.openai.test_tools import PARAMETERS, TEMPLATE, TWO_CALLS
from tandem.tests.router.support import CONTEXT

WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS}
NOW: dict[str, Any] = {"type": "function", "name": "now", "description": "the time"}
CALL_EVENTS = (
    "response.output_item.added", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done",
)  # fmt: skip


def test_tool_calls_are_items_and_accept_results() -> None:
    with openai_client(tiny(TEMPLATE)) as (c, client):
        c.node.reply = c.encode(TWO_CALLS)
        first = client.responses.create(input="hi", tools=[WEATHER, NOW])
        message, *calls = first.output
        assert (message.type, first.output_text) == ("message", "I look.")
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Öl", "Ys"]
        assert {(call.type, call.name, call.status) for call in calls} == {
            ("function_call", "weather", "completed")
        }
        assert first.tools[0].name == "weather" and first.parallel_tool_calls
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"warm {i}"}
            for i, call in enumerate(calls)
        ]
        c.node.reply = c.encode("fine")
        first_stored = client.responses.create(
            input=results, previous_response_id=first.id, tools=[WEATHER]
        )
        text = c.prompt()
        assert "I look.[weather][weather]" in text
        assert text.index("[weather]") < text.index("tool\nwarm 0") < text.index("warm 1")
        # The same without the store: items go back as they came.
        history = [{"role": "user", "content": "hi"}, *first.output, *results]
        again = client.responses.create(input=history, tools=[WEATHER], store=False)
        assert c.prompt() == text and again.output_text == first_stored.output_text == "fine"


def test_calls_are_streamed_as_events_of_their_items() -> None:
    with openai_client(tiny(TEMPLATE)) as (c, client):
        c.node.reply = c.encode(TWO_CALLS)
        stream = client.responses.create(input="hi", tools=[WEATHER], stream=True)
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        second = [event for event in events if getattr(event, "output_index", 0) == 2]
        assert tuple(dict.fromkeys(event.type for event in second)) == CALL_EVENTS
        deltas = [event.delta for event in second if event.type.endswith(".delta")]
        done = next(event for event in second if event.type.endswith("arguments.done"))
        assert len(deltas) > 2 and "".join(deltas) == done.arguments == '{"city": "Ys"}'
        assert events[-1].response.output[2] == second[-1].item
        strict = WEATHER | {"strict": True, "parameters": PARAMETERS | {"required": ["city"]}}
        with client.responses.stream(model="tiny", input="hi", tools=[strict]) as response_stream:
            final = response_stream.get_final_response()
        assert [item.parsed_arguments for item in final.output[1:]] == [
            {"city": "Öl"},
            {"city": "Ys"},
        ]


CHOICES: tuple[tuple[Any, str], ...] = (
    ("required", '[{"name":"now","parameters":{}}]'),
    ({"type": "function", "name": "now"}, "{}"),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}],
        },
        '[{"name":"now","parameters":{}}]',
    ),
)


def test_every_kind_of_tool_choice() -> None:
    with openai_client(tiny(TEMPLATE)) as (c, client):
        for choice, reply in CHOICES:
            c.node.reply = c.encode(reply)
            response = client.responses.create(
                input="hi", tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False
            )
            [call] = response.output
            assert (call.name, call.arguments) == ("now", "{}") and response.status == "completed"
            assert c.node.requests[-1].sampling.HasField("structured_outputs")
        c.node.reply = c.encode("no")
        response = client.responses.create(input="hi", tools=[NOW], tool_choice="none")
        assert response.output_text == "no"


# The tools of Codex, reduced: it offers web search to every server.
CODEX: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "patch", "description": "one",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: two"}},
    {"type": "namespace", "name": "agents", "description": "three",
     "tools": [NOW | {"defer_loading": False}, WEATHER]},
]  # fmt: skip


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_custom_tools_and_namespaces_are_functions_of_the_prompt() -> None:
    with openai_client(tiny(TEMPLATE), context=2048) as (c, client):
        c.node.reply = c.encode(call_text("patch", input="a\nb") + call_text("agents__now"))
        body: dict[str, Any] = {"input": "hi", "tools": CODEX, "model": "tiny"}
        response = client.responses.create(**body)
        patch, now = response.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "a\nb")
        assert (now.type, now.name, now.namespace) == ("function_call", "now", "agents")
        assert [tool.type for tool in response.tools] == ["web_search", "custom", "namespace"]
        text = c.prompt()
        for part in ("Lark grammar:\\nstart: two", '"three\\n\\nthe time"', "agents__weather"):
            assert part in text
        assert "web_search" not in text
        stream = client.responses.create(**body, stream=True)
        events = [event for event in stream if getattr(event, "output_index", 1) == 0]
        assert [event.type.removeprefix("response.") for event in events] == [
            "output_item.added", "custom_tool_call_input.delta",
            "custom_tool_call_input.done", "output_item.done",
        ]  # fmt: skip
        assert events[1].delta == events[2].input == events[3].item.input == "a\nb"
        results = [
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "fine"},
            {"type": "function_call_output", "call_id": now.call_id, "output": "noon"},
        ]
        client.responses.create(**body | {"input": [*response.output, *results]})
        assert "[patch][agents__now]<|end|>\n<|start|>tool\nfine" in c.prompt()
        c.node.reply = c.encode('[{"name":"patch","parameters":{"input": """\nx')
        forced = {"type": "custom", "name": "patch"}
        response = client.responses.create(**body, tool_choice=forced)
        assert response.output[0].input == "x"


def test_the_input_of_a_custom_tool_may_be_written_without_its_object() -> None:
    for output, expected in (
        ('{"input":"x"}', "x"),
        ("x", "x"),
        ('{"patch":"x"}', '{"patch":"x"}'),
    ):
        assert custom_input(output) == expected


class PortCity(BaseModel):
    name: str


def test_a_format_constrains_the_text_and_is_parsed() -> None:
    with openai_client() as (c, client):
        c.node.reply = c.encode('{"name":"Ys"}')
        response = client.responses.parse(model="tiny", input="hi", text_format=PortCity)
        assert (
            response.output_parsed == PortCity(name="Ys")
            and response.text.format.name == "PortCity"
        )
        assert "name" in c.node.requests[-1].sampling.structured_outputs.json
        text: Any = {"format": {"type": "json_object"}}
        client.responses.create(input="hi", text=text)
        assert c.node.requests[-1].sampling.structured_outputs.json_object
        assert c.node.requests[-1].sampling.structured_outputs.param == "text.format"


def test_logprobs_of_the_text_are_included() -> None:
    with openai_client() as (c, client):
        body: dict[str, Any] = {
            "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        }  # fmt: skip
        response = client.responses.create(**body)
        logprobs = response.output[0].content[0].logprobs
        assert "".join(entry.token for entry in logprobs) == "hello world"
        assert {len(entry.top_logprobs) for entry in logprobs} == {2}
        stream = client.responses.create(**body, stream=True)
        events = list(stream)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        streamed = [entry.token for event in deltas for entry in event.logprobs]
        assert streamed == [entry.token for entry in logprobs]
        last = events[-1].response
        assert last.output[0].content[0].logprobs == logprobs
        assert c.stored(last.id).body == last.to_dict()


def test_reasoning_is_an_item_that_may_go_back() -> None:
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}")
    with openai_client(tiny(template), reasoning_parser="qwen3") as (c, client):
        c.node.reply = c.encode("<think>one two</think>three")
        response = client.responses.create(input="hi", include=["reasoning.encrypted_content"])
        reasoning, message = response.output
        assert reasoning.content[0].text == "one two" and response.output_text == "three"
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        item = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": reasoning.encrypted_content,
        }
        client.responses.create(input=[item, message, {"role": "user", "content": "x"}])
        assert "assistant\none two<|end|>" in c.prompt()
        with client.responses.stream(model="tiny", input="hi") as stream:
            kinds = dict.fromkeys([event.type for event in stream])
        assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds


def test_a_conversation_that_is_too_long_loses_its_oldest_turns() -> None:
    with openai_client() as (c, client):
        turns: list[dict[str, Any]] = []
        for i in range(9):
            turns += [
                {"role": "user", "content": f"question {i} " + "x" * 60},
                {"role": "assistant", "content": "a"},
            ]
        turns.append({"role": "user", "content": "last"})
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.responses.create(input=turns, max_output_tokens=50)
        response = client.responses.create(
            input=turns, truncation="auto", max_output_tokens=50, instructions="be brief"
        )
        text = c.prompt()
        assert "be brief" in text and "last" in text and "question 8" in text
        assert "question 0" not in text and response.truncation == "auto"
        room = CONTEXT - 50 - len(c.node.requests[-1].prompt)
        assert 0 <= room < 80  # not one turn more fits
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.responses.create(input="y" * 5000, truncation="auto")


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}, NOW | {"name": 5}]}, "tools[1].name"),
    ({"tools": [CODEX[2] | {"tools": [NOW, NOW | {"name": "?"}]}]}, "tools[0].tools[1].name"),
    ({"tools": [CODEX[2] | {"tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [CODEX[1] | {"name": ""}]}, "tools[0].name"),
    ({"tools": [NOW, {"type": "x"}]}, "tools[1].type"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    (
        {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}},
        "tool_choice.mode",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "x"}}}, "text.format.type"),
    ({"max_output_tokens": CONTEXT}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input"),
)


def test_errors_name_the_fields_of_this_api() -> None:
    with openai_client() as (c, _):
        for fields, param in WRONG:
            response = c.post("/v1/responses", **{"input": "hi", **fields})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param, error
            assert "function.name" not in error["message"]


def test_calls_that_the_router_ran_are_calls_and_results_of_one_turn() -> None:
    item: dict[str, Any] = {
        "type": "mcp_call", "id": "m", "server_label": "s", "name": "t", "arguments": "{bad",
    }  # fmt: skip
    read = read_input([item | {"arguments": "{}", "output": "r"}], set())
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        *read,
        item | {"output": None, "error": {"type": "x"}},
        {"type": "message", "role": "assistant", "content": [{"text": "done"}]},
    ]
    first, *results, last = as_messages(items)
    assert first["reasoning_content"] == "hm" and len(first["tool_calls"]) == 2
    assert first["tool_calls"][1]["function"] == {
        "name": "s__t",
        "arguments": "{bad",
    }
    assert [result["content"] for result in results] == ["r", 'Error: {"type": "x"}']
    assert last == {"role": "assistant", "content": "done"}
