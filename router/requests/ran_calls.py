"""Tool calls that the router ran for an earlier response, as messages to the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .body_model import BodyModel, DocumentedAs
from .call_arguments import HistoryArguments
from .json_size import json_text
from .mcp_tools import model_name


class RanCall(BodyModel):
    """A call in ``mcp_calls`` of an earlier response."""

    type: Any = None
    id: Annotated[str, Field(max_length=256)]
    server_label: Annotated[str, Field(max_length=64)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[Any, DocumentedAs(str)] = None
    output: str | None = None
    error: Any = None
    status: Any = None


def ran_turn(
    calls: list[Any], param: str, arguments: HistoryArguments, ignored: set[str]
) -> list[dict[str, Any]]:
    """A message with the tool calls, and one with each result. Raises ``RequestError``."""
    ran_calls = [
        RanCall.read(call, ignored, "messages[].mcp_calls[].", at=f"{param}[{i}]")
        for i, call in enumerate(calls)
    ]
    tool_calls = [_tool_call(call, arguments.read(call.arguments)) for call in ran_calls]
    message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    return [message, *map(_result, ran_calls)]


def outcome_text(output: str | None, error: Any) -> str:
    """The result of a tool call as text for the model."""
    return f"Error: {json_text(error)}" if output is None else output


def _tool_call(call: RanCall, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": model_name(call.server_label, call.name), "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _result(call: RanCall) -> dict[str, Any]:
    text = outcome_text(call.output, call.error)
    return {"role": "tool", "tool_call_id": call.id, "content": text}
