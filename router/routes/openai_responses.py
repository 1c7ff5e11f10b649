"""OpenAI's API: responses."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from ..errors import ApiError, invalid
from ..openai.response_models import OpenAIError
from ..responses.body import ENDED
from ..responses.continued_conversation import Conversations
from ..responses.input_tokens import (
    CountInputTokensRequest,
    InputTokenCount,
    input_token_counter,
)
from ..responses.request import CreateResponseRequest, ResponseRequest
from ..responses.surface import Responses
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .responses import ComputedResponse, EncodedResponse, GenerationResponse
from .services import Exchange, RouterServices, Services
from .stored import Owner, page_of, page_parameters

MAX_LISTED, LISTED = 100, 20


class RawMessage(BaseModel):
    """A prompt, or an output of the model."""

    message: str
    tokens: list[int]
    type: Literal["raw_message_tokens"]


class ResponseObject(BaseModel):
    """OpenAI's response object, with raw messages on ``enable_response_messages``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
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
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    safety_identifier: str | None
    truncation: str
    usage: dict[str, Any] | None
    user: str | None
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None


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


MODELS = (
    CreateResponseRequest,
    ResponseObject,
    ResponseEvent,
    CountInputTokensRequest,
    InputTokenCount,
)
LIST_PARAMETERS = {"parameters": page_parameters(MAX_LISTED, LISTED)}

router = APIRouter(
    tags=["openai"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


class CreatedResponse(GenerationResponse):
    """A generated response, or, with ``background``, its initial state."""

    def __init__(
        self, exchange: Exchange, services: Services, conversations: Conversations
    ) -> None:
        surface = Responses(services.chat, conversations)
        super().__init__(exchange, services.handler, surface)
        self._responses = surface
        self._runs = services.runs
        self._owner = conversations.owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, surface = self._exchange, self._responses
        async with self._handler.parsing(exchange, surface) as (request, deadline):
            if isinstance(request, ResponseRequest) and request.params.background:
                formatter = surface.formatter(request, int(time.time()))
                run = await self._runs.start(exchange, surface, formatter, self._owner, deadline)
                await exchange.respond_json(200, run.body)
            else:
                await self._handler.respond(exchange, surface, request, deadline)


async def _conversations(services: RouterServices, owner: Owner) -> Conversations:
    return Conversations(services.responses, services.approvals, owner)


OwnConversations = Annotated[Conversations, Depends(_conversations)]


@router.post(Responses.path, **documented(CreateResponseRequest, ResponseObject, ResponseEvent))
async def create_response(
    exchange: Exchange, services: RouterServices, conversations: OwnConversations
) -> Response:
    """Generate the next turn of a conversation, and store it if requested."""
    return CreatedResponse(exchange, services, conversations)


@router.post("/v1/responses/input_tokens", **documented(CountInputTokensRequest, InputTokenCount))
async def count_input_tokens(
    exchange: Exchange, services: RouterServices, conversations: OwnConversations
) -> Response:
    """Count the tokens of a response's prompt."""
    count = input_token_counter(services.chat, conversations, services.options)
    return ComputedResponse(exchange, services.handler, count)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def show_response(
    response_id: str, request: Request, exchange: Exchange, services: RouterServices, owner: Owner
) -> Response:
    """A stored response, or one in progress in the background."""
    run = services.runs.find(response_id, owner)
    body = (await services.responses.get(response_id, owner)).body if run is None else run.body
    if request.query_params.get("stream", "false") != "false":
        message = "A stored response cannot be streamed; leave 'stream' out to get it as a whole."
        raise invalid(message, "stream", "unsupported_value")
    return EncodedResponse(exchange, body)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    response_id: str, services: RouterServices, owner: Owner
) -> ResponseDeletion:
    """Delete a response; cancel it if it is in progress."""
    await services.runs.cancel(response_id, owner)
    await services.responses.delete(response_id, owner)
    return ResponseDeletion(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel_response(
    response_id: str, exchange: Exchange, services: RouterServices, owner: Owner
) -> Response:
    """Cancel a response in the background; no-op if it has ended."""
    await services.runs.cancel(response_id, owner)
    body = (await services.responses.get(response_id, owner)).body
    if not body["background"]:
        raise ApiError(400, "Cannot cancel a synchronous response.")
    assert body["status"] in ENDED
    return EncodedResponse(exchange, body)


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_model=InputItemList,
    openapi_extra=LIST_PARAMETERS,
)
async def list_input_items(
    response_id: str, request: Request, exchange: Exchange, services: RouterServices, owner: Owner
) -> Response:
    """The input of a stored response, without the input of earlier responses."""
    items = (await services.responses.get(response_id, owner)).items
    page = page_of(request, max_limit=MAX_LISTED, default=LISTED)
    ordered = items[::-1] if page.newest_first else items
    ids = [item["id"] for item in ordered]
    if page.after is not None and page.after not in ids:
        raise invalid(f"Invalid 'after': no item has the id '{page.after[:64]}'.", "after")
    start = 0 if page.after is None else ids.index(page.after) + 1
    data = ordered[start : start + page.limit]
    page_body = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + page.limit < len(ordered),
    }
    return EncodedResponse(exchange, page_body)
