"""OpenAI's responses as a surface: a chat whose earlier turns may be in the store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ..errors import ApiError, invalid
from ..generation import GenerationRequest
from ..http.sse import named_event
from ..mcp.mcp_chat import McpChat
from ..mcp.request_approvals import RequestApprovals
from ..openai.error_body import OpenAIErrors
from ..options import RouterOptions
from ..requests.fitting_turns import parse_fitting
from ..requests.renamed_errors import fields_renamed
from ..served_model import ServedModel
from .background_runs import BackgroundRun
from .chat_turns import Message, as_messages, told
from .compaction.between_rounds import CompactionBetweenRounds
from .compaction.compaction_events import CompactionEvents
from .compaction.context_management import compaction_threshold
from .compaction.summary import parse_summary, parse_summary_of
from .compaction.summary_first import parse_within
from .continued_conversation import ContinuedConversation, Conversations
from .input_items import Item
from .response_events import ResponseEvents
from .response_request import FIELD_NAMES, CreateResponseRequest, chat_body, check_response
from .response_store import StoredResponse
from .response_tools import ResponseTools, read_response_tools

RESPONSE_FORMAT, TEXT_FORMAT = "response_format", "text.format"
# Fields of a chat that a summary does not have.
WITHOUT_SUMMARY = (
    *("tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "top_logprobs"),
    *("stop", "ignore_eos", "thinking_token_budget", "reasoning_effort", "verbosity"),
)
# The limit of a response is that of its answer.
WITHOUT_LIMIT = (*WITHOUT_SUMMARY, "max_completion_tokens")


class Responses:
    """POST /v1/responses, for one request."""

    path = "/v1/responses"

    def __init__(self, chat: McpChat, conversations: Conversations) -> None:
        self._chat = chat
        self._conversations = conversations
        self._asked: CreateResponseRequest
        self._conversation: ContinuedConversation
        self._tools: ResponseTools
        self._run: BackgroundRun | None = None

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        ignored: set[str] = set()
        self._asked = asked = CreateResponseRequest.read(body, ignored)
        check_response(asked, ignored)
        self._tools = tools = read_response_tools(asked.tools, ignored)
        conversations = self._conversations
        self._conversation = conversations.read(asked.input, asked.previous_response_id, ignored)
        if asked.background:
            runs, owner = conversations.runs, conversations.owner
            self._run = BackgroundRun(runs, owner, self.path, logged=asked.stream)
        approvals = conversations.approvals_of(self._conversation)
        threshold = compaction_threshold(asked.context_management, model, ignored)

        def parse(conversation: ContinuedConversation) -> GenerationRequest:
            return parse_turns(
                asked, tools, conversation, self._chat, approvals, model, options, threshold
            )

        conversation = self._conversation
        if threshold is None or approvals.answers or not conversation.is_compactable:
            request = parse(conversation)
        else:
            items, without = conversation.whole, WITHOUT_LIMIT
            request = parse_within(
                threshold,
                conversation,
                parse,
                lambda: _summary(asked, tools, items, model, options, without=without),
            )
        return replace(
            request,
            request_id=conversations.store.new_id(),
            stream=asked.stream,
            ignored={*ignored, *request.ignored},
        )

    def response(self, request: GenerationRequest, created: int) -> ResponseEvents:
        run = self._run
        form = CompactionEvents if self._conversation.compacts else ResponseEvents
        events = form(request, created, self._asked, self._tools.called, self._store, run)
        if run is not None:
            run.formatted_by(events)
        return events

    def _store(self, body: dict[str, Any], size: int) -> None:
        """Keep a response that has ended, unless the client wants none of it kept."""
        if self._asked.store:
            log = None if self._run is None else self._run.log
            stored = StoredResponse(
                owner=self._conversations.owner,
                body=body,
                items=self._conversation.items,
                conversation=[*self._conversation.whole, *body["output"]],
                size=self._conversation.size + 2 * size + (0 if log is None else log.bytes),
                log=log,
            )
            self._conversations.store.add(stored)


class BatchedResponses(Responses):
    """POST /v1/responses as a line of a batch, whose output file has the answer."""

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
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
    threshold: int | None = None,
) -> GenerationRequest:
    """The chat completion that computes a response, which is compacted between rounds with prompts
    of more tokens than ``threshold``. Streams have the limits of whole answers: their
    last event is one."""
    if conversation.compacts:
        return _summary(asked, tools, conversation.whole, model, options)

    compaction = _between_rounds(asked, tools, conversation, model, options, threshold)

    def parse(messages: list[Message]) -> GenerationRequest:
        turns = [*told(asked.instructions), *messages]
        body = chat_body(asked, tools, turns, is_partial=conversation.is_partial)
        most = asked.max_tool_calls
        return chat.parse(
            body,
            model,
            options,
            most_calls=most,
            approvals=approvals,
            grammars=tools.grammars,
            compaction=compaction,
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


def _between_rounds(
    asked: CreateResponseRequest,
    tools: ResponseTools,
    conversation: ContinuedConversation,
    model: ServedModel,
    options: RouterOptions,
    threshold: int | None,
) -> CompactionBetweenRounds | None:
    if threshold is None or conversation.is_partial:
        return None
    sampling = chat_body(asked, tools, [], is_partial=False) | dict.fromkeys(WITHOUT_LIMIT)
    return CompactionBetweenRounds(
        threshold=threshold,
        conversation=conversation,
        instructions=asked.instructions,
        summarize=lambda messages: parse_summary_of(sampling, messages, model, options),
    )


def _summary(
    asked: CreateResponseRequest,
    tools: ResponseTools,
    items: list[Item],
    model: ServedModel,
    options: RouterOptions,
    without: Collection[str] = WITHOUT_SUMMARY,
) -> GenerationRequest:
    """The chat completion of a summary, with the sampling parameters of a response."""
    sampling = chat_body(asked, tools, [], is_partial=False) | dict.fromkeys(without)
    return parse_summary(sampling, asked.instructions, items, model, options)


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
