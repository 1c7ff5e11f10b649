"""OpenAI's responses as a surface: a chat whose earlier turns may be in the store."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import ApiError, invalid
from ..generation import Generate, GenerationRequest, Outputs, extended
from ..http.sse import named_event
from ..mcp.chat import McpChat
from ..mcp.request_approvals import RequestApprovals
from ..openai.chat_request import ChatRequest
from ..openai.errors import OpenAIErrors
from ..options import RouterOptions
from ..requests.fitting_turns import parse_fitting
from ..requests.renamed_errors import fields_renamed
from ..served_model import ServedModel
from ..surface import Surface
from .chat_turns import Message, as_messages, told
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
        asked = CreateResponseRequest.read(body, ignored)
        check_response(asked, ignored)
        tools = read_response_tools(asked.tools, ignored)
        conversations = self._conversations
        conversation = conversations.read(asked.input, asked.previous_response_id, ignored)
        approvals = conversations.approvals_of(conversation)
        request = parse_turns(asked, tools, conversation, self._chat, approvals, model, options)
        return extended(
            ResponseRequest,
            request,
            asked=asked,
            called=tools.called,
            conversation=conversation,
            request_id=conversations.store.new_id(),
            stream=asked.stream,
            ignored={*ignored, *request.ignored},
        )

    def formatter(self, request: GenerationRequest, created: int) -> ResponsesFormatter:
        assert isinstance(request, ResponseRequest), "made by parse"
        return ResponsesFormatter(request, created, partial(self._store, request))

    def outputs(self, request: GenerationRequest, generate: Generate) -> Outputs:
        return self._chat.outputs(request, generate, self._conversations.owner)

    def stored(
        self, request: ResponseRequest, body: dict[str, Any], *, in_progress: bool = False
    ) -> StoredResponse:
        """What is kept of a response, whose ``body`` is as it is now."""
        return StoredResponse(
            owner=self._conversations.owner,
            body=body,
            items=request.conversation.items,
            earlier=request.conversation.earlier,
            in_progress=in_progress,
        )

    async def _store(self, request: ResponseRequest, body: dict[str, Any]) -> None:
        """Keep a response that has ended, unless the client wants none of it kept."""
        if request.asked.store:
            with suppress(ApiError):  # it has been logged, and the client gets its response
                await self._conversations.store.add(self.stored(request, body))


class BatchedResponses(Responses):
    """POST /v1/responses as a line of a batch, whose output file has the answer."""

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> ResponseRequest:
        for name in ("background", "store"):
            if body.get(name):
                message = f"'{name}' is not available in a batch; leave it out."
                raise invalid(message, name, "unsupported_value")
        return super().parse(body | {"store": False}, model, options)


def parse_turns(
    asked: CreateResponseRequest,
    tools: ResponseTools,
    conversation: ContinuedConversation,
    chat: McpChat,
    approvals: RequestApprovals,
    model: ServedModel,
    options: RouterOptions,
) -> ChatRequest:
    """The chat completion that computes a response. Streams have the limits of whole answers: their
    last event is one."""

    def parse(messages: list[Message]) -> ChatRequest:
        turns = [*told(asked.instructions), *messages]
        body = chat_body(asked, tools, turns, is_partial=conversation.is_partial)
        most = asked.max_tool_calls
        return chat.parse(
            body,
            model,
            options,
            max_calls=most,
            approvals=approvals,
            grammars=tools.grammars,
        )

    messages = as_messages(conversation.whole)
    with fields_renamed(FIELD_NAMES), tools.places_in_errors():
        fits = asked.truncation == "disabled"
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
