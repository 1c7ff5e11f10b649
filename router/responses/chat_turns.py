"""Convert the items of a conversation to chat messages."""

from __future__ import annotations

from typing import Any

from ..mcp.approval_items import REQUEST, RESPONSE, result_text
from ..requests.mcp_tools import model_name
from ..requests.ran_calls import outcome_text
from .input_items import Item
from .tools import chat_name, custom_arguments

Message = dict[str, Any]


def as_messages(items: list[Item]) -> list[Message]:
    """Convert items. Reasoning, text and tool calls of one turn of the model become one message."""
    turns = _Turns(_ApprovedCalls(items))
    for item in items:
        turns.add(item)
    turns.end()
    return turns.messages


def instruction_messages(instructions: str | None) -> list[Message]:
    """A system message with the instructions of a request, if it has any."""
    return [{"role": "system", "content": instructions}] if instructions else []


class _ApprovedCalls:
    """The tool calls of a conversation that needed an approval. Each becomes one call in a message,
    at the place of its approval request."""

    def __init__(self, items: list[Item]) -> None:
        self._requests = {item["id"] for item in items if item["type"] == REQUEST}
        self._approvals = {i["approval_request_id"]: i for i in items if i["type"] == RESPONSE}
        self._calls = {i["approval_request_id"]: i for i in items if self.has_request(i)}

    def has_request(self, item: Item) -> bool:
        """True for a call that ran after an approval request in the conversation."""
        return item["type"] == "mcp_call" and item.get("approval_request_id") in self._requests

    def result(self, request: Item) -> str:
        """The result of a call as text for the model."""
        call = self._calls.get(request["id"])
        if call is not None:
            return outcome_text(call["output"], call["error"])
        return result_text(request, self._approvals)


class _Turns:
    """Collects messages. The last one may be an open turn of the model, with the results of its MCP
    calls to be added after it."""

    def __init__(self, approvals: _ApprovedCalls) -> None:
        self._approvals = approvals
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        self._results: list[dict[str, Any]] = []

    def add(self, item: Item) -> None:
        match item["type"]:
            case "reasoning":
                self._add_reasoning(item["content"][0]["text"] if item["content"] else "")
            case "message" if item["role"] == "assistant":
                self._add_text(_text(item))
            case "message":
                self._append({"role": item["role"], "content": _text(item)})
            case "function_call":
                self._add_call(item["call_id"], _name(item), item["arguments"])
            case "custom_tool_call":
                self._add_call(item["call_id"], _name(item), custom_arguments(item["input"]))
            case "function_call_output" | "custom_tool_call_output":
                self._append(_result(item["call_id"], item["output"]))
            case "mcp_call" if not self._approvals.has_request(item):
                self._add_mcp_call(item, outcome_text(item["output"], item["error"]))
            case "mcp_approval_request":
                self._add_mcp_call(item, self._approvals.result(item))

    def end(self) -> None:
        """Close the turn of the model, if one is open."""
        self._turn = None
        self.messages += self._results
        self._results = []

    def _append(self, message: dict[str, Any]) -> None:
        self.end()
        self.messages.append(message)

    def _open(self) -> dict[str, Any]:
        if self._turn is None:
            self._append({"role": "assistant", "content": ""})
            self._turn = self.messages[-1]
        return self._turn

    def _add_reasoning(self, text: str) -> None:
        if self._turn is not None and (self._results or self._turn["content"]):
            self.end()
        turn = self._open()
        turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), text)))

    def _add_text(self, text: str) -> None:
        if self._turn is not None and (self._results or self._turn["content"]):
            self.end()
        self._open()["content"] = text

    def _add_mcp_call(self, item: Item, result: str) -> None:
        """Add a call that the router ran, and its result."""
        name = model_name(item["server_label"], item["name"])
        self._add_call(item["id"], name, item["arguments"])
        self._results.append(_result(item["id"], result))

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open().setdefault("tool_calls", []).append(call)


def _name(item: Item) -> str:
    return chat_name(item["name"], item.get("namespace"))


def _text(item: Item) -> str:
    return "".join(part["text"] for part in item["content"])


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
