"""Tools for chat templates without support for them.

Definitions, earlier tool calls and their results are written into the text of messages, in Hermes'
format, which many models know and others can follow. Only roles that every template has are used.
"""

from __future__ import annotations

import re
from typing import Any

from .json_size import json_text

# The parser for tool calls that follow ``INSTRUCTIONS``.
TEXT_FORMAT = "hermes"
INSTRUCTIONS = """\
You can call functions. Each of these lines describes one as JSON:
{tools}
To call functions, write one JSON object for each call, between these tags:
<tool_call>
{{"name": "name of the function", "arguments": {{"argument": "value"}}}}
</tool_call>
Do not write the results of calls: they come with the next message. If no function helps, answer \
without one."""
_TOOLS = re.compile(r"(?<!\w)tools(?!\w)")
_TOOL_ROLE = re.compile(r"""['"]tool['"]""")

Message = dict[str, Any]


def supports_tools(template: str) -> bool:
    """True if a template uses the variable ``tools``."""
    return _TOOLS.search(template) is not None


def with_tools_as_text(
    messages: list[Message], tools: list[dict[str, Any]] | None, template: str
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools for a template; what it does not support is moved into the text of
    messages."""
    if "tool_calls" not in template:
        messages = [_with_calls(message) for message in messages]
    if not _TOOL_ROLE.search(template):
        messages = _with_results(messages)
    if tools and not supports_tools(template):
        return _with_definitions(messages, tools), None
    return messages, tools


def _with_calls(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = "\n".join(_call_text(call["function"]) for call in message["tool_calls"])
    content = message["content"]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": f"{content}\n{calls}" if content else calls}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json_text(call)}\n</tool_call>"


def _with_results(messages: list[Message]) -> list[Message]:
    """Turn results into messages of the user. All results of a turn, and a question after them,
    are one message, because many templates reject two user messages in a row."""
    merged: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        if after_result and message["role"] == "user":
            merged[-1]["content"] += f"\n{message['content']}"
            continue
        merged.append(message)
        after_result = is_result
    return merged


def _with_definitions(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Add the definitions to the first system or user message, so that their place does not change
    while a conversation grows. Not every template supports a system message."""
    text = INSTRUCTIONS.format(tools="\n".join(json_text(tool["function"]) for tool in tools))
    for i, message in enumerate(messages):
        if (role := message["role"]) in ("system", "developer", "user"):
            parts = [text, message["content"]] if role == "user" else [message["content"], text]
            joined = message | {"content": "\n\n".join(filter(None, parts))}
            return [*messages[:i], joined, *messages[i + 1 :]]
    return [{"role": "system", "content": text}, *messages]
