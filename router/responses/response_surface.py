"""OpenAI's responses as a surface: a chat whose earlier turns may be in the store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ..errors import ApiError
from ..generation import GenerationRequest
from ..http.sse import named_event
from ..mcp.approvals import Approvals
from ..mcp.mcp_chat import McpChat
from ..mcp.request_approvals import RequestApprovals
from ..openai.error_body import OpenAIErrors
from ..options import RouterOptions
from ..requests.renamed_errors import fields_renamed
from ..served_model import ServedModel
from .approval_items import new_answers
from .background_runs import BackgroundRun, BackgroundRuns
from .chat_turns import as_messages
from .fitting_turns import parse_fitting
from .input_items import Item, read_input
from .response_events import ResponseEvents
from .response_request import FIELD_NAMES, CreateResponseRequest, chat_body, check_response
from .response_store import ResponseStore, StoredResponse

RESPONSE_FORMAT, TEXT_FORMAT = "response_format", "text.format"


class Responses:
    """POST /v1/responses, for one request of the ``owner`` of a key."""

    path = "/v1/responses"

    def __init__(
        self,
        chat: McpChat,
        store: ResponseStore,
        runs: BackgroundRuns,
        approvals: Approvals,
        owner: str,
    ) -> None:
        self._chat = chat
        self._approvals = approvals
        self._stored = store
        self._runs = runs
        self._owner = owner
        self._asked: CreateResponseRequest
        self._items: list[Item]
        self._conversation: list[Item]
        self._size = 0
        self._run: BackgroundRun | None = None

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        ignored: set[str] = set()
        self._asked = asked = CreateResponseRequest.read(body, ignored)
        check_response(asked, ignored)
        self._items = read_input(asked.input, ignored)
        self._conversation = [*self._earlier(asked.previous_response_id), *self._items]
        self._size += len(json.dumps(self._items))
        if asked.background:
            self._run = BackgroundRun(self._runs, self._owner, self.path, logged=asked.stream)
        with fields_renamed(FIELD_NAMES):
            request = self._parsed(asked, model, options)
        if request.sampling.structured_outputs.param == RESPONSE_FORMAT:
            request.sampling.structured_outputs.param = TEXT_FORMAT
        return replace(
            request,
            request_id=self._stored.new_id(),
            stream=asked.stream,
            ignored={*ignored, *request.ignored},
        )

    def response(self, request: GenerationRequest, created: int) -> ResponseEvents:
        run = self._run
        events = ResponseEvents(request, created, self._asked, self._store, run)
        if run is not None:
            run.formatted_by(events)
        return events

    def _parsed(
        self, asked: CreateResponseRequest, model: ServedModel, options: RouterOptions
    ) -> GenerationRequest:
        """Streams have the limits of whole answers: their last event is one."""
        told = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        answers = new_answers(self._items, self._conversation)
        approvals = RequestApprovals(self._approvals, self._owner, answers)
        most = asked.max_tool_calls

        def parse(messages: list[dict[str, Any]]) -> GenerationRequest:
            body = chat_body(asked, [*told, *messages])
            return self._chat.parse(body, model, options, most_calls=most, approvals=approvals)

        messages = as_messages(self._conversation)
        return parse_fitting(messages, parse) if asked.truncation == "auto" else parse(messages)

    def _earlier(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        name = "previous_response_id"
        self._runs.check_ended(response_id, self._owner, name)
        stored = self._stored.get(response_id, self._owner, name)
        self._size += stored.size
        return stored.conversation

    def _store(self, body: dict[str, Any], size: int) -> None:
        """Keep a response that has ended, unless the client wants none of it kept."""
        if self._asked.store:
            log = None if self._run is None else self._run.log
            stored = StoredResponse(
                owner=self._owner,
                body=body,
                items=self._items,
                conversation=[*self._conversation, *body["output"]],
                size=self._size + 2 * size + (0 if log is None else log.bytes),
                log=log,
            )
            self._stored.add(stored)


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
