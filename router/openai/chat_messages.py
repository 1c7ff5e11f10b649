"""The messages of a chat request: checked, and converted to the form that templates expect."""

from __future__ import annotations

import json
import re
from typing import Any

from ...shared.text.chat_template import flatten_content
from ..errors import invalid
from ..served_model import ServedModel
from .body_fields import Fields, wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 16_384
MAX_TOOL_CALLS = 1024
FIELDS = frozenset(
    (
        "role",
        "content",
        "name",
        "reasoning_content",
        "reasoning",
        "tool_calls",
        "tool_call_id",
        # Fields of a response that is sent back as part of the history.
        "refusal",
        "annotations",
    )
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}
_TOOL_ROLE = re.compile(r"""['"]tool['"]""")


def read_messages(fields: Fields, model: ServedModel) -> list[dict[str, Any]]:
    """Read the messages in the form that templates expect."""
    if "messages" not in fields:
        message = "Missing required parameter: 'messages'."
        raise invalid(message, "messages", "missing_required_parameter")
    messages = fields.array("messages", MAX_MESSAGES)
    if not messages:
        raise invalid(
            "Invalid 'messages': empty array; expected at least one message.",
            "messages",
            "empty_array",
        )
    return [
        _MessageReader(fields, item, f"messages[{i}]", model).read()
        for i, item in enumerate(messages)
    ]


class _MessageReader:
    """One message; ``param`` is its name in errors."""

    def __init__(self, parent: Fields, item: Any, param: str, model: ServedModel) -> None:
        if not isinstance(item, dict):
            raise wrong_type(param, "an object", item)
        self._param = param
        self._fields = parent.inner(item, "messages[]")
        template = model.tokenizer.template
        self._template = "" if template is None else template.source

    def read(self) -> dict[str, Any]:
        role = self._role()
        self._fields.check_names(FIELDS, UNSUPPORTED)
        made: dict[str, Any] = {"role": role, "content": self._content(role)}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if name in self._fields:
                made[name] = self._fields.string(name, "", 1 << 20)
        # vLLM's newer name of the same field; templates use the older one.
        if "reasoning" in self._fields:
            reasoning = self._fields.string("reasoning", "", 1 << 20)
            made.setdefault("reasoning_content", reasoning)
        calls = self._fields.array("tool_calls", MAX_TOOL_CALLS)
        if calls:
            made["tool_calls"] = self._tool_calls(calls, role)
        return made

    def _role(self) -> str:
        role = self._fields.string("role", "", 64)
        if role not in ROLES:
            raise invalid(
                f"Invalid value for '{self._param}.role': '{role}'; supported values are: "
                f"{', '.join(ROLES)}.",
                f"{self._param}.role",
                "invalid_value",
            )
        if role == "tool" and not _TOOL_ROLE.search(self._template):
            raise self._unsupported("role", "messages of role 'tool'")
        # OpenAI's newer name of the system role, for templates without it.
        if role == "developer" and self._template and "developer" not in self._template:
            return "system"
        return role

    def _content(self, role: str) -> str:
        if "content" in self._fields:
            return flatten_content(self._fields.raw("content"), param=f"{self._param}.content")
        if role != "assistant":
            message = f"Missing required parameter: '{self._param}.content'."
            raise invalid(message, f"{self._param}.content", "missing_required_parameter")
        return ""  # as in vLLM: a message may consist of tool calls only

    def _tool_calls(self, calls: list[Any], role: str) -> list[dict[str, Any]]:
        """The assistant's earlier tool calls, for templates that render them."""
        if role != "assistant" or "tool_calls" not in self._template:
            raise self._unsupported("tool_calls", "tool calls in messages")
        return [
            self._tool_call(call, f"{self._param}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]

    def _tool_call(self, call: Any, param: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"'{param}.function.name' must be a string.", param, "invalid_type")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _arguments(arguments, param)
        made = {"name": function["name"], "arguments": arguments or {}}
        return {"id": call.get("id"), "type": "function", "function": made}

    def _unsupported(self, name: str, what: str) -> Exception:
        param = f"{self._param}.{name}"
        message = f"'{param}': this model's chat template has no place for {what}."
        return invalid(message, param, "unsupported_value")


def _arguments(text: str, param: str) -> Any:
    """Parse the arguments, which clients send as a string of JSON."""
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        message = f"'{param}.function.arguments' is not valid JSON."
        raise invalid(message, param, "invalid_value") from None


def characters_of(value: Any) -> int:
    """The length of all strings in a JSON value, keys included."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list):
            left.extend(item)
        elif isinstance(item, dict):
            left.extend(item)
            left.extend(item.values())
    return total
