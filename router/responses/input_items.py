"""Check the items of a response's input, and complete them as the API returns them."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from ..errors import invalid
from ..requests.body_errors import too_long, wrong_type
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.json_size import fits, json_text

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
REFERENCE = "item_reference"
# The maximum number of messages of a chat.
MAX_ITEMS = 16_384
MAX_ID = 256
MAX_REASON = 4096
# Characters and values of the error of a tool call.
MAX_ERROR = 64 * 1024

Item = dict[str, Any]
Id = Annotated[str, Field(max_length=MAX_ID)]


class ToolCallItem(BodyModel):
    """A tool call of the model."""

    type: Any
    id: Id | None = None
    call_id: Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Id | None = None
    status: Any = None


class FunctionCallItem(ToolCallItem):
    """A function call."""

    arguments: Annotated[Any, DocumentedAs(str)] = None


class CustomCallItem(ToolCallItem):
    """A call of a custom tool."""

    input: str


class FunctionOutputItem(BodyModel):
    """The result of a function call or a custom tool call."""

    type: Any
    id: Id | None = None
    call_id: Id
    name: Any = None
    output: Any
    status: Any = None


class McpCallItem(BodyModel):
    """An MCP tool call that the router ran."""

    type: Any
    id: Id
    server_label: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[Any, DocumentedAs(str)] = None
    output: str | None = None
    error: Any = None
    status: Any = None
    approval_request_id: Id | None = None


class ApprovalRequestItem(BodyModel):
    """An MCP tool call that needs the client's approval."""

    type: Any
    id: Id
    server_label: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    status: Any = None


class ApprovalResponseItem(BodyModel):
    """The client's response to an approval request."""

    type: Any
    id: Id | None = None
    approval_request_id: Id
    approve: bool
    reason: Annotated[str, Field(max_length=MAX_REASON)] | None = None


class ReasoningItem(BodyModel):
    """Reasoning of an earlier response, as text or in ``encrypted_content``."""

    type: Any
    id: Id | None = None
    summary: Any = None
    content: list[dict[str, Any]] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: Any = None


class ReferenceItem(BodyModel):
    """An item of a stored response."""

    type: Any = None
    id: Annotated[str, Field(min_length=1, max_length=MAX_ID)]


def read_input(value: Any, ignored: set[str]) -> list[Item]:
    """Check items; references are not resolved. Raises ``RequestError``."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array", value)
    if not value:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    if len(value) > MAX_ITEMS:
        raise too_long("input", value, MAX_ITEMS)
    return [_item(item, f"input[{i}]", ignored) for i, item in enumerate(value)]


def _item(item: Any, param: str, ignored: set[str]) -> Item:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    kind = item.get("type", "message" if "role" in item else REFERENCE)
    parse = _KINDS.get(kind) if isinstance(kind, str) else None
    if parse is None:
        message = f"Invalid '{param}': items of the type '{str(kind)[:64]}' are not supported."
        raise invalid(message, "input", "unsupported_value")
    return parse(item, param, ignored)


def _message(item: Item, param: str, ignored: set[str]) -> Item:
    role, text = item.get("role"), _text(item.get("content"), f"{param}.content")
    if role not in ROLES:
        message = f"Invalid '{param}.role': must be 'user', 'assistant', 'system' or 'developer'."
        raise invalid(message, "input", "invalid_value")
    part: Item = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": []}
    message_item = {"id": _id(item, "msg"), "type": "message", "status": "completed"}
    return message_item | {"role": role, "content": [part]}


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(param, "a string or an array", content)
    return "".join(_part(part, param) for part in content)


def _part(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        message = f"Invalid '{param}': this model supports text parts only."
        raise invalid(message, "input", "unsupported_value")
    return str(part["text"])


def _function_call(item: Item, param: str, ignored: set[str]) -> Item:
    fields = FunctionCallItem.read(item, ignored, "input[].", at=param)
    return _tool_call(item, "fc", fields) | {"arguments": _arguments(fields.arguments)}


def _custom_call(item: Item, param: str, ignored: set[str]) -> Item:
    fields = CustomCallItem.read(item, ignored, "input[].", at=param)
    return _tool_call(item, "ctc", fields) | {"input": fields.input}


def _tool_call(item: Item, kind: str, fields: ToolCallItem) -> Item:
    call = {
        "id": _id(item, kind),
        "type": fields.type,
        "status": "completed",
        "call_id": fields.call_id,
        "name": fields.name,
    }
    return call if fields.namespace is None else call | {"namespace": fields.namespace}


def _function_output(item: Item, param: str, ignored: set[str]) -> Item:
    fields = FunctionOutputItem.read(item, ignored, "input[].", at=param)
    output = _text(fields.output, f"{param}.output")
    return {
        "id": _id(item, "fco"),
        "type": fields.type,
        "status": "completed",
        "call_id": fields.call_id,
        "output": output,
    }


def _mcp_call(item: Item, param: str, ignored: set[str]) -> Item:
    fields = McpCallItem.read(item, ignored, "input[].", at=param)
    if not fits(fields.error, MAX_ERROR):
        message = f"Invalid '{param}.error': it has more than {MAX_ERROR} characters and values."
        raise invalid(message, f"{param}.error", "too_large")
    return {
        "id": fields.id,
        "type": "mcp_call",
        "status": "completed",
        "server_label": fields.server_label,
        "name": fields.name,
        "arguments": _arguments(fields.arguments),
        "output": fields.output,
        "error": fields.error,
        "approval_request_id": fields.approval_request_id,
    }


def _approval_request(item: Item, param: str, ignored: set[str]) -> Item:
    fields = ApprovalRequestItem.read(item, ignored, "input[].", at=param)
    return {
        "id": fields.id,
        "type": "mcp_approval_request",
        "server_label": fields.server_label,
        "name": fields.name,
        "arguments": fields.arguments,
    }


def _approval_response(item: Item, param: str, ignored: set[str]) -> Item:
    fields = ApprovalResponseItem.read(item, ignored, "input[].", at=param)
    return {
        "id": _id(item, "mcpa"),
        "type": "mcp_approval_response",
        "approval_request_id": fields.approval_request_id,
        "approve": fields.approve,
        "reason": fields.reason,
    }


def _listing(item: Item, param: str, ignored: set[str]) -> Item:
    """A list of tools, of which only the place counts: each request has its own definitions."""
    return {"id": _id(item, "mcpl"), "type": "mcp_list_tools", "tools": []}


def _reference(item: Item, param: str, ignored: set[str]) -> Item:
    fields = ReferenceItem.read(item, ignored, "input[].", at=param)
    return {"id": fields.id, "type": REFERENCE}


def _reasoning(item: Item, param: str, ignored: set[str]) -> Item:
    fields = ReasoningItem.read(item, ignored, "input[].", at=param)
    texts = [part["text"] for part in fields.content if isinstance(part.get("text"), str)]
    text = "".join(texts) or _decode_reasoning(fields.encrypted_content or "", param)
    return {
        "id": _id(item, "rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def as_input(item: Item) -> Item:
    """An output item as an input item, which has no logprobs."""
    if item["type"] != "message":
        return item
    parts = [{name: part[name] for name in part if name != "logprobs"} for part in item["content"]]
    return item | {"content": parts}


def encode_reasoning(text: str) -> str:
    """A text as ``encrypted_content``, which is opaque to clients, but not secret."""
    return base64.b64encode(text.encode()).decode()


def _decode_reasoning(content: str, param: str) -> str:
    try:
        return base64.b64decode(content, validate=True).decode()
    except ValueError:
        message = f"Invalid '{param}.encrypted_content': it is not from this server."
        raise invalid(message, "input", "invalid_value") from None


def _arguments(value: Any) -> str:
    """Arguments as text. They may be invalid, because a model wrote them."""
    if isinstance(value, str):
        return value
    return "" if value is None else json_text(value)


def _id(item: Item, kind: str) -> str:
    item_id = item.get("id")
    return (
        item_id[:MAX_ID] if isinstance(item_id, str) and item_id else f"{kind}_{uuid.uuid4().hex}"
    )


_KINDS: Mapping[str, Callable[[Item, str, set[str]], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _function_output,
    "mcp_call": _mcp_call,
    "mcp_approval_request": _approval_request,
    "mcp_approval_response": _approval_response,
    "mcp_list_tools": _listing,
    "reasoning": _reasoning,
    REFERENCE: _reference,
}
