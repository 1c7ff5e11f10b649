"""Approvals of tool calls as items of a conversation."""

from __future__ import annotations

from typing import Any

from ..errors import invalid
from .approvals import ApprovalResponse
from .server_tools import ServerTool

REQUEST, RESPONSE = "mcp_approval_request", "mcp_approval_response"
# Items of the model. An approval before one of them belongs to an earlier turn.
OF_MODEL = frozenset(("reasoning", "function_call", "mcp_call", REQUEST))
DENIED = "The user has denied this call, so it was not run."
# The result of a call in an earlier turn, if the client has left it out.
NO_RESULT = "The result of this call is not known."
# Ids that an error lists.
MAX_LISTED = 16

Item = dict[str, Any]


def new_responses(items: list[Item], conversation: list[Item]) -> list[ApprovalResponse]:
    """The approval responses among the ``items`` of a request, which end its ``conversation``.
    Raises ``RequestError``."""
    requests = {item["id"]: item for item in conversation if item["type"] == REQUEST}
    if not requests and not any(item["type"] == RESPONSE for item in items):
        return []
    responses: dict[str, ApprovalResponse] = {}
    last = max((i for i, item in enumerate(items) if _is_of_model(item)), default=-1)
    for i, item in enumerate(items):
        if item["type"] != RESPONSE:
            continue
        param = f"input[{i}].approval_request_id"
        request = requests.get(item["approval_request_id"])
        if request is None:
            raise invalid(
                f"'{param}': the conversation has no approval request "
                f"'{item['approval_request_id'][:64]}'; send its 'mcp_approval_request' item too, "
                f"or its response's id as 'previous_response_id'.",
                param,
                "approval_request_not_found",
            )
        if request["id"] in responses:
            message = f"'{param}': '{request['id'][:64]}' is answered twice."
            raise invalid(message, param, "duplicate_approval")
        if i > last:
            responses[request["id"]] = _response(item, request, param)
    _check_complete(requests, conversation)
    return list(responses.values())


def result_text(request: Item, responses: dict[str, Item]) -> str:
    """The result, for the model, of a call that has not run."""
    response = responses.get(request["id"])
    if response is None or response["approve"]:
        return NO_RESULT
    reason = response["reason"]
    return f"{DENIED} Reason: {reason}" if reason else DENIED


def _is_of_model(item: Item) -> bool:
    return item["type"] in OF_MODEL or item.get("role") == "assistant"


def _response(item: Item, request: Item, param: str) -> ApprovalResponse:
    return ApprovalResponse(
        id=request["id"],
        tool=ServerTool(request["server_label"], request["name"]),
        arguments=request["arguments"],
        approve=item["approve"],
        param=param,
    )


def _check_complete(requests: dict[str, Item], conversation: list[Item]) -> None:
    closed_ids = {item["approval_request_id"] for item in conversation if item["type"] == RESPONSE}
    open_ids = [approval_id for approval_id in requests if approval_id not in closed_ids]
    if open_ids:
        ids = ", ".join(approval_id[:64] for approval_id in open_ids[:MAX_LISTED])
        message = f"The following MCP approval requests do not have an approval: {ids}"
        raise invalid(message, "input", "missing_approval")
