"""The items of a response's input: checked, and completed as clients see them again."""

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
# As many as a chat may have messages.
MAX_ITEMS = 16_384
MAX_ID = 256
MAX_REASON = 4096
# Characters and values of the error of a call.
MAX_ERROR = 64 * 1024

Item = dict[str, Any]
Id = Annotated[str, Field(max_length=MAX_ID)]


class ToolCallItem(BodyModel):
    """A call that the model has made."""

    type: Any
    id: Id | None = None
    call_id: Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Id | None = None
    status: Any = None


class FunctionCallItem(ToolCallItem):
    """A call of a function."""

    arguments: Annotated[Any, DocumentedAs(str)] = None


class CustomCallItem(ToolCallItem):
    """A call of a custom tool."""

    input: str


class FunctionOutputItem(BodyModel):
    """The result of a call, of a function or a custom tool."""

    type: Any
    id: Id | None = None
    call_id: Id
    name: Any = None
    output: Any
    status: Any = None


class McpCallItem(BodyModel):
    """A call that the router has run."""

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
    """A call that the router runs if the client approves it."""

    type: Any
    id: Id
    server_label: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    status: Any = None


class ApprovalResponseItem(BodyModel):
    """The client's answer to a request for approval."""

    type: Any
    id: Id | None = None
    approval_request_id: Id
    approve: bool
    reason: Annotated[str, Field(max_length=MAX_REASON)] | None = None


class ReasoningItem(BodyModel):
    """Reasoning of an earlier answer, as text or in ``encrypted_content``."""

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


def read_input(given: Any, ignored: set[str]) -> list[Item]:
    """Check items; references stay such. Raises ``RequestError`` for items that this server cannot
    use."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise wrong_type("input", "a string or an array", given)
    if not given:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    if len(given) > MAX_ITEMS:
        raise too_long("input", given, MAX_ITEMS)
    return [_item(item, f"input[{i}]", ignored) for i, item in enumerate(given)]


def _item(item: Any, param: str, ignored: set[str]) -> Item:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    kind = item.get("type", "message" if "role" in item else REFERENCE)
    read = _KINDS.get(kind) if isinstance(kind, str) else None
    if read is None:
        message = f"Invalid '{param}': items of the type '{str(kind)[:64]}' are not supported."
        raise invalid(message, "input", "unsupported_value")
    return read(item, param, ignored)


def _message(item: Item, param: str, ignored: set[str]) -> Item:
    role, text = item.get("role"), _text(item.get("content"), f"{param}.content")
    if role not in ROLES:
        message = f"Invalid '{param}.role': 'user', 'assistant', 'system' or 'developer'."
        raise invalid(message, "input", "invalid_value")
    part: Item = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": []}
    shown = {"id": _id(item, "msg"), "type": "message", "status": "completed"}
    return shown | {"role": role, "content": [part]}


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
        message = f"Invalid '{param}': this model takes parts with text only."
        raise invalid(message, "input", "unsupported_value")
    return str(part["text"])


def _function_call(item: Item, param: str, ignored: set[str]) -> Item:
    read = FunctionCallItem.read(item, ignored, "input[].", at=param)
    return _call(item, "fc", read) | {"arguments": _arguments(read.arguments)}


def _custom_call(item: Item, param: str, ignored: set[str]) -> Item:
    read = CustomCallItem.read(item, ignored, "input[].", at=param)
    return _call(item, "ctc", read) | {"input": read.input}


def _call(item: Item, kind: str, read: ToolCallItem) -> Item:
    shown = {
        "id": _id(item, kind),
        "type": read.type,
        "status": "completed",
        "call_id": read.call_id,
        "name": read.name,
    }
    return shown if read.namespace is None else shown | {"namespace": read.namespace}


def _function_output(item: Item, param: str, ignored: set[str]) -> Item:
    read = FunctionOutputItem.read(item, ignored, "input[].", at=param)
    output = _text(read.output, f"{param}.output")
    return {
        "id": _id(item, "fco"),
        "type": read.type,
        "status": "completed",
        "call_id": read.call_id,
        "output": output,
    }


def _mcp_call(item: Item, param: str, ignored: set[str]) -> Item:
    read = McpCallItem.read(item, ignored, "input[].", at=param)
    if not fits(read.error, MAX_ERROR):
        message = f"Invalid '{param}.error': it has more than {MAX_ERROR} characters and values."
        raise invalid(message, f"{param}.error", "too_large")
    return {
        "id": read.id,
        "type": "mcp_call",
        "status": "completed",
        "server_label": read.server_label,
        "name": read.name,
        "arguments": _arguments(read.arguments),
        "output": read.output,
        "error": read.error,
        "approval_request_id": read.approval_request_id,
    }


def _approval_request(item: Item, param: str, ignored: set[str]) -> Item:
    read = ApprovalRequestItem.read(item, ignored, "input[].", at=param)
    return {
        "id": read.id,
        "type": "mcp_approval_request",
        "server_label": read.server_label,
        "name": read.name,
        "arguments": read.arguments,
    }


def _approval_response(item: Item, param: str, ignored: set[str]) -> Item:
    read = ApprovalResponseItem.read(item, ignored, "input[].", at=param)
    return {
        "id": _id(item, "mcpa"),
        "type": "mcp_approval_response",
        "approval_request_id": read.approval_request_id,
        "approve": read.approve,
        "reason": read.reason,
    }


def _listing(item: Item, param: str, ignored: set[str]) -> Item:
    """Definitions of tools are those of each request."""
    return {"id": _id(item, "mcpl"), "type": "mcp_list_tools", "tools": []}


def _reference(item: Item, param: str, ignored: set[str]) -> Item:
    read = ReferenceItem.read(item, ignored, "input[].", at=param)
    return {"id": read.id, "type": REFERENCE}


def _reasoning(item: Item, param: str, ignored: set[str]) -> Item:
    read = ReasoningItem.read(item, ignored, "input[].", at=param)
    texts = [part["text"] for part in read.content if isinstance(part.get("text"), str)]
    text = "".join(texts) or _decoded(read.encrypted_content or "", param)
    return {
        "id": _id(item, "rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def as_input(item: Item) -> Item:
    """An item of an output as one of an input, which has no logprobs."""
    if item["type"] != "message":
        return item
    parts = [{name: part[name] for name in part if name != "logprobs"} for part in item["content"]]
    return item | {"content": parts}


def encoded(text: str) -> str:
    """A text as ``encrypted_content``: opaque to clients, but no secret."""
    return base64.b64encode(text.encode()).decode()


def _decoded(content: str, param: str) -> str:
    try:
        return base64.b64decode(content, validate=True).decode()
    except ValueError:
        message = f"Invalid '{param}.encrypted_content': it is not from this server."
        raise invalid(message, "input", "invalid_value") from None


def _arguments(given: Any) -> str:
    """The text of arguments, which the model may have written wrongly."""
    if isinstance(given, str):
        return given
    return "" if given is None else json_text(given)


def _id(item: Item, kind: str) -> str:
    given = item.get("id")
    return given[:MAX_ID] if isinstance(given, str) and given else f"{kind}_{uuid.uuid4().hex}"


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
