"""Approvals of calls among the items of a conversation."""

from __future__ import annotations

from typing import Any

from ..errors import invalid
from .approvals import ApprovalResponse
from .server_tools import ServerTool

REQUEST, RESPONSE = "mcp_approval_request", "mcp_approval_response"
# Items of the model after an answer show that it belongs to an earlier turn.
OF_MODEL = frozenset(("reasoning", "function_call", "mcp_call", REQUEST))
DENIED = "The user has denied this call, so it was not run."
# Of a call in an earlier turn whose result the client has left out.
NO_RESULT = "The result of this call is not known."
# What is listed in an error.
MAX_LISTED = 16

Item = dict[str, Any]


def new_answers(items: list[Item], conversation: list[Item]) -> list[ApprovalResponse]:
    """The answers among the ``items`` of a request, which end its ``conversation``. Raises
    ``RequestError``."""
    asked = {item["id"]: item for item in conversation if item["type"] == REQUEST}
    if not asked and not any(item["type"] == RESPONSE for item in items):
        return []
    found: dict[str, ApprovalResponse] = {}
    last = max((i for i, item in enumerate(items) if _is_of_model(item)), default=-1)
    for i, item in enumerate(items):
        if item["type"] != RESPONSE:
            continue
        param = f"input[{i}].approval_request_id"
        request = asked.get(item["approval_request_id"])
        if request is None:
            raise invalid(
                f"'{param}': the conversation has no approval request "
                f"'{item['approval_request_id'][:64]}'; send its 'mcp_approval_request' item too, "
                f"or its response's id as 'previous_response_id'.",
                param,
                "approval_request_not_found",
            )
        if request["id"] in found:
            message = f"'{param}': '{request['id'][:64]}' is answered twice."
            raise invalid(message, param, "duplicate_approval")
        if i > last:
            found[request["id"]] = _answer(item, request, param)
    _check_complete(asked, conversation)
    return list(found.values())


def result_text(request: Item, responses: dict[str, Item]) -> str:
    """The result of a call that has not run, for the model."""
    response = responses.get(request["id"])
    if response is None or response["approve"]:
        return NO_RESULT
    reason = response["reason"]
    return f"{DENIED} Reason: {reason}" if reason else DENIED


def _is_of_model(item: Item) -> bool:
    return item["type"] in OF_MODEL or item.get("role") == "assistant"


def _answer(item: Item, request: Item, param: str) -> ApprovalResponse:
    return ApprovalResponse(
        id=request["id"],
        tool=ServerTool(request["server_label"], request["name"]),
        arguments=request["arguments"],
        approve=item["approve"],
        param=param,
    )


def _check_complete(asked: dict[str, Item], conversation: list[Item]) -> None:
    answered = {item["approval_request_id"] for item in conversation if item["type"] == RESPONSE}
    open_ids = [approval_id for approval_id in asked if approval_id not in answered]
    if open_ids:
        listed = ", ".join(approval_id[:64] for approval_id in open_ids[:MAX_LISTED])
        message = f"The following MCP approval requests do not have an approval: {listed}"
        raise invalid(message, "input", "missing_approval")
