"""Tools for chat templates that have no place for them.

Definitions, earlier calls and their results are written into the text of messages, in Hermes'
format, which many models know and others can follow. The roles stay those of any template.
"""

from __future__ import annotations

import re
from typing import Any

from .json_size import json_text

# The parser of the calls that a model makes when it is told so.
WRITTEN_FORMAT = "hermes"
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


def shows_tools(template: str) -> bool:
    """True if a template writes definitions of tools, by its variable for them."""
    return _TOOLS.search(template) is not None


def with_written_tools(
    messages: list[Message], tools: list[dict[str, Any]] | None, template: str
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools for a template: what it does not show is in the messages' text."""
    if "tool_calls" not in template:
        messages = [_with_calls(message) for message in messages]
    if not _TOOL_ROLE.search(template):
        messages = _with_results(messages)
    if tools and not shows_tools(template):
        return _with_definitions(messages, tools), None
    return messages, tools


def _with_calls(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
    content = message["content"]
    made = {name: value for name, value in message.items() if name != "tool_calls"}
    return made | {"content": f"{content}\n{calls}" if content else calls}


def _call(function: dict[str, Any]) -> str:
    shown = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json_text(shown)}\n</tool_call>"


def _with_results(messages: list[Message]) -> list[Message]:
    """The results of a turn and a question after them are one message: many templates reject two
    of the user in a row."""
    made: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        if after_result and message["role"] == "user":
            made[-1]["content"] += f"\n{message['content']}"
            continue
        made.append(message)
        after_result = is_result
    return made


def _with_definitions(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """In the first message of the system or the user, so that they stay where they are while a
    conversation grows: not every template takes a system message."""
    text = INSTRUCTIONS.format(tools="\n".join(json_text(tool["function"]) for tool in tools))
    for i, message in enumerate(messages):
        if (role := message["role"]) in ("system", "developer", "user"):
            parts = [text, message["content"]] if role == "user" else [message["content"], text]
            joined = message | {"content": "\n\n".join(filter(None, parts))}
            return [*messages[:i], joined, *messages[i + 1 :]]
    return [{"role": "system", "content": text}, *messages]
