"""Calls of an earlier answer that the router has run: they go back to the model as a turn."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .body_model import BodyModel, DocumentedAs
from .call_arguments import HistoryArguments
from .json_size import json_text
from .mcp_names import model_name


class RanCall(BodyModel):
    """A call in ``mcp_calls`` of an earlier answer."""

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
    """A message with the calls, and their results. Raises ``RequestError``."""
    read = [
        RanCall.read(call, ignored, "messages[].mcp_calls[].", at=f"{param}[{i}]")
        for i, call in enumerate(calls)
    ]
    called = [_called(call, arguments.read(call.arguments)) for call in read]
    message = {"role": "assistant", "content": "", "tool_calls": called}
    return [message, *map(_result, read)]


def outcome_text(output: str | None, error: Any) -> str:
    """What the model is told of a call."""
    return f"Error: {json_text(error)}" if output is None else output


def _called(call: RanCall, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": model_name(call.server_label, call.name), "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _result(call: RanCall) -> dict[str, Any]:
    text = outcome_text(call.output, call.error)
    return {"role": "tool", "tool_call_id": call.id, "content": text}
