"""The surface of OpenAI's Responses API: chats whose earlier turns may be in the store."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import ApiError, invalid
from ..generation import Generate, GenerationRequest, Outputs, extended
from ..http.encoding import named_event
from ..mcp.chat import McpChat
from ..mcp.request_approvals import RequestApprovals
from ..openai.chat_request import ChatRequest
from ..openai.errors import OpenAIErrors
from ..options import RouterOptions
from ..requests.body_errors import fields_renamed
from ..requests.fitting_turns import parse_fitting
from ..served_model import ServedModel
from ..surface import Surface
from .chat_turns import Message, as_messages, instruction_messages
from .continued_conversation import Conversations
from .formatter import ResponsesFormatter
from .request import (
    FIELD_NAMES,
    ContinuedConversation,
    CreateResponseRequest,
    ResponseRequest,
    chat_body,
    check_response,
)
from .store import StoredResponse
from .tools import ResponseTools, read_response_tools

RESPONSE_FORMAT, TEXT_FORMAT = "response_format", "text.format"


class Responses(Surface):
    """POST /v1/responses, for one owner."""

    path = "/v1/responses"

    def __init__(self, chat: McpChat, conversations: Conversations) -> None:
        self._chat = chat
        self._conversations = conversations

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> ResponseRequest:
        ignored: set[str] = set()
        params = CreateResponseRequest.read(body, ignored)
        check_response(params, ignored)
        tools = read_response_tools(params.tools, ignored)
        conversations = self._conversations
        conversation = conversations.read(params.input, params.previous_response_id, ignored)
        approvals = conversations.approvals_of(conversation)
        request = parse_turns(params, tools, conversation, self._chat, approvals, model, options)
        return extended(
            ResponseRequest,
            request,
            params=params,
            client_tools=tools.client_tools,
            conversation=conversation,
            request_id=conversations.store.new_id(),
            stream=params.stream,
            ignored={*ignored, *request.ignored},
        )

    def formatter(self, request: GenerationRequest, created: int) -> ResponsesFormatter:
        assert isinstance(request, ResponseRequest), "created by parse"
        return ResponsesFormatter(request, created, partial(self._store, request))

    def outputs(self, request: GenerationRequest, generate: Generate) -> Outputs:
        return self._chat.outputs(request, generate, self._conversations.owner)

    def stored_response(
        self, request: ResponseRequest, body: dict[str, Any], *, in_progress: bool = False
    ) -> StoredResponse:
        """The entry for the store of a response whose current body is ``body``."""
        return StoredResponse(
            owner=self._conversations.owner,
            body=body,
            items=request.conversation.items,
            earlier=request.conversation.earlier,
            in_progress=in_progress,
        )

    async def _store(self, request: ResponseRequest, body: dict[str, Any]) -> None:
        """Store a response that has ended, unless ``store`` is false."""
        if request.params.store:
            with suppress(ApiError):  # logged by the database; the client still gets its response
                await self._conversations.store.add(self.stored_response(request, body))


class BatchedResponses(Responses):
    """POST /v1/responses as a line of a batch. Nothing is stored except the result."""

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> ResponseRequest:
        for name in ("background", "store"):
            if body.get(name):
                message = f"'{name}' is not available in a batch; leave it out."
                raise invalid(message, name, "unsupported_value")
        return super().parse(body | {"store": False}, model, options)


def parse_turns(
    params: CreateResponseRequest,
    tools: ResponseTools,
    conversation: ContinuedConversation,
    chat: McpChat,
    approvals: RequestApprovals,
    model: ServedModel,
    options: RouterOptions,
) -> ChatRequest:
    """The chat completion for a response. Streams have the same limits as unary responses, since
    their last event contains the whole response."""

    def parse(messages: list[Message]) -> ChatRequest:
        turns = [*instruction_messages(params.instructions), *messages]
        body = chat_body(params, tools, turns, is_partial=conversation.is_partial)
        return chat.parse(
            body,
            model,
            options,
            max_calls=params.max_tool_calls,
            approvals=approvals,
            grammars=tools.grammars,
        )

    messages = as_messages(conversation.all_items)
    with fields_renamed(FIELD_NAMES), tools.places_in_errors():
        fits = params.truncation == "disabled"
        request = parse(messages) if fits else parse_fitting(messages, parse)
    constrained = request.sampling.structured_outputs
    if constrained.param == RESPONSE_FORMAT:
        constrained.param = TEXT_FORMAT
    elif constrained.param:
        constrained.param = tools.place_of(constrained.param)
    return request


class ResponseErrors(OpenAIErrors):
    """OpenAI's errors, with an event of its own at the end of a stream."""

    def error_event(self, error: ApiError) -> bytes:
        value = {
            "type": "error",
            "sequence_number": 0,
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }
        return named_event("error", value)
