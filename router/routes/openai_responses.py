"""OpenAI's API: responses."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ..errors import ApiError, invalid
from ..openai.answers import OpenAIError
from ..responses.response_request import CreateResponseRequest
from ..responses.response_surface import Responses
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import GenerationResponse
from .services import Exchange, RouterServices
from .stored import Owner, page_of, page_parameters

MAX_LISTED, LISTED = 100, 20


class ResponseObject(BaseModel):
    """OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    user: str | None


class ResponseEvent(BaseModel):
    """The data of each event of a streamed response."""

    type: str
    sequence_number: int


class ResponseDeletion(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


MODELS = (CreateResponseRequest, ResponseObject, ResponseEvent)
LIST_PARAMETERS = {"parameters": page_parameters(MAX_LISTED, LISTED)}

router = APIRouter(
    tags=["openai"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


@router.post(Responses.path, **documented(CreateResponseRequest, ResponseObject, ResponseEvent))
async def create_response(exchange: Exchange, services: RouterServices, owner: Owner) -> Response:
    """Generate the next turn of a conversation, which the router may keep."""
    return GenerationResponse(exchange, services.handler, Responses(services.responses, owner))


@router.get("/v1/responses/{response_id}")
async def show_response(
    response_id: str, request: Request, services: RouterServices, owner: Owner
) -> ResponseObject:
    """A response that was stored."""
    if request.query_params.get("stream", "false") != "false":
        raise invalid("A stored response is not streamed; leave out 'stream'.", "stream")
    return ResponseObject.model_validate(services.responses.get(response_id, owner).body)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    response_id: str, services: RouterServices, owner: Owner
) -> ResponseDeletion:
    """Forget a response."""
    services.responses.delete(response_id, owner)
    return ResponseDeletion(id=response_id)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(
    response_id: str, services: RouterServices, owner: Owner
) -> ResponseObject:
    """Rejected: only a response in the background could be cancelled, and there are none."""
    services.responses.get(response_id, owner)
    raise ApiError(400, "Cannot cancel a synchronous response.")


@router.get("/v1/responses/{response_id}/input_items", openapi_extra=LIST_PARAMETERS)
async def list_input_items(
    response_id: str, request: Request, services: RouterServices, owner: Owner
) -> InputItemList:
    """The input of a stored response, without that of earlier ones."""
    items = services.responses.get(response_id, owner).items
    page = page_of(request, most=MAX_LISTED, default=LISTED)
    ordered = items[::-1] if page.newest_first else items
    ids = [item["id"] for item in ordered]
    if page.after is not None and page.after not in ids:
        raise invalid(f"Invalid 'after': no item has the id '{page.after[:64]}'.", "after")
    start = 0 if page.after is None else ids.index(page.after) + 1
    data = ordered[start : start + page.limit]
    return InputItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=start + page.limit < len(ordered),
    )
