"""Format a response as OpenAI's object and stream of events. Output items are in the order in which
the model writes them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...shared.text.output import CallDelta
from ..errors import ApiError
from ..generation import ChoiceDelta, GenerationRequest, Output, RequestAdmitted, ScoredToken
from ..http.encoding import named_event
from ..http.memory_budget import MemoryShare
from ..http.text_template import StampedTemplates
from ..mcp.approval_items import REQUEST
from ..mcp.round_delta import ApprovalRequest, ExecutedCall, RoundDelta
from ..openai.chat_formatter import TokenEntries
from ..openai.response_fields import token_names
from ..result import GenerationResult
from ..surface import ResponseFormatter
from ..usage import Usage
from .body import ENDED, response_body
from .output_item import EVENTS, OutputItem
from .raw_messages import NO_MESSAGES, RawMessages
from .request import ENCRYPTED_REASONING, ResponseRequest
from .tools import ClientTool

# Stores the body of a response that has ended.
Store = Callable[[dict[str, Any]], Awaitable[None]]


class ResponsesFormatter(ResponseFormatter):
    """Formats one response. It keeps all output, also of a stream, whose last event repeats it.
    Without a stream, events are empty."""

    def __init__(
        self,
        request: ResponseRequest,
        created: int,
        store: Store,
    ) -> None:
        self.request = request
        self._created = created
        self._store = store
        self.status = "queued"  # or "in_progress"; not updated at the end
        self._entries = TokenEntries(request.model.tokenizer, token_names(request))
        self._memory: MemoryShare | None = None
        self._number = 0
        self._raw = RawMessages(request) if request.params.enable_response_messages else None
        self._open: OutputItem | None = None  # the current item
        self._output: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._running: dict[str, OutputItem] = {}  # MCP calls without results so far, by id
        self._pending: list[ScoredToken] = []  # tokens whose text has not come yet
        self._deltas = StampedTemplates(self._delta_event)
        self._final: dict[str, Any] | None = None  # the body at the end

    def account_in(self, memory: MemoryShare) -> None:
        self._memory = memory

    def collector(self, request: GenerationRequest, memory: MemoryShare) -> ResponsesFormatter:
        self.account_in(memory)
        return self

    def add(self, output: Output) -> None:
        match output:
            case RequestAdmitted() if self.status == "queued":  # ignore later admissions
                self.status = "in_progress"
                self._list_tools()
            case ChoiceDelta():
                self.chunk(output)

    def result(self, usage: Usage) -> GenerationResult:
        """A result without output, which the formatter has."""
        return GenerationResult([], usage=usage)

    def so_far(self) -> dict[str, Any]:
        """The body of the response in progress, with the items so far."""
        return self._body(self.status, self._output)

    def abort(self, error: ApiError | None) -> None:
        """End a response in the background with an error, or as cancelled. No-op if it has
        ended."""
        if self._final is not None:
            return
        self._finish = "length"  # marks open items as incomplete
        self._end_item()
        self._end_running_calls()
        status = "cancelled" if error is None else "failed"
        self._final = self._body(status, self._output, error=error)

    async def store(self) -> None:
        assert self._final is not None
        await self._store(self._final)

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return self._complete(result.usage)[1]

    def opening(self) -> bytes:
        body = self._body("in_progress", [])
        events = self._event("response.created", response=body)
        events += self._event("response.in_progress", response=body)
        return events + self._list_tools()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if self._raw is not None:
            if isinstance(delta, RoundDelta) and delta.next_request is not None:
                self._raw.begin(delta.next_request)
            self._take(self._raw.take(delta.tokens))
        return self._items(delta)

    def _items(self, delta: ChoiceDelta) -> bytes:
        """The events of a delta's output items."""
        events: list[bytes] = []  # results of calls are large, so they are joined once
        if delta.reasoning:
            self._pending.clear()
            if self.request.include_reasoning:
                events.append(self._write("reasoning", delta.reasoning))
        if self.request.logprobs is not None and not delta.reasoning and not delta.calls:
            self._pending += delta.scored
        if delta.text:
            events.append(self._write("message", delta.text, self._logprobs()))
        for call in delta.calls:
            self._pending.clear()
            events.append(self._add_call(call))
        if isinstance(delta, RoundDelta):
            for executed in delta.executed_calls:
                events.append(self._finish_mcp_call(executed))
            for approval in delta.approval_requests:
                events.append(self._request_approval(approval))
        self._finish = delta.finish_reason or self._finish
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        events, body = self._complete(usage)
        kind = f"response.{body['status']}"
        return events + self._event(kind, response=body)

    def _complete(self, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        events = self._end_running_calls()
        has_output = any(item["type"] != "mcp_list_tools" for item in self._output)
        events += b"" if has_output else self._begin("message")
        events += self._end_item()
        status = _status(self._finish)
        self._final = body = self._body(status, self._output, usage)
        return events, body

    def _write(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """New text of an item of this kind. Begins the item if it is not the current one."""
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._begin(kind)
        item = self._open
        assert item is not None
        if not logprobs:
            return events + self._delta(item, text)
        before = len(item.logprobs)
        item.logprobs.extend(logprobs)
        self._take(len(text) + len(item.logprobs) - before)
        item.text.write(text)
        fields: dict[str, Any] = {"delta": text, "logprobs": list(logprobs)}
        return events + self._event(f"response.{EVENTS[kind]}.delta", **item.place, **fields)

    def _add_call(self, call: CallDelta) -> bytes:
        """New arguments of a tool call. A delta with a name begins it."""
        events = b""
        if call.name:
            events = self._begin_call(call)
        item = self._open
        assert item is not None
        return events + self._delta(item, call.arguments) if call.arguments else events

    def _delta(self, item: OutputItem, text: str) -> bytes:
        """New text or arguments of an item."""
        self._take(len(text))
        item.text.write(text)
        if not self.request.stream or item.is_custom:
            return b""
        number, self._number = self._number, self._number + 1
        return self._deltas.fill(item.id, b"%d" % number, text)

    def _begin_call(self, call: CallDelta) -> bytes:
        rounds = self.request.rounds
        tool = None if rounds is None else rounds.tools.get(call.name)
        if tool is None:
            return self._begin_client_call(call)
        approval = call.id if rounds is not None and call.id in rounds.approved else None
        fields = {"server_label": tool.label, "name": tool.name, "approval_request_id": approval}
        events = self._begin("mcp_call", fields | {"output": None, "error": None})
        item = self._open
        assert item is not None
        self._running[call.id] = item
        return events + self._event("response.mcp_call.in_progress", **item.place)

    def _begin_client_call(self, call: CallDelta) -> bytes:
        """Begin a call that the client runs, under the client's name for the tool."""
        tool = self.request.client_tools.get(call.name, ClientTool(call.name))
        fields = {"call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        return self._begin("custom_tool_call" if tool.custom else "function_call", fields)

    def _finish_mcp_call(self, call: ExecutedCall) -> bytes:
        """Add the result of a call that the router ran."""
        events = self._end_item()
        item = self._running.pop(call.id)
        outcome = call.outcome()
        item.fields |= {"output": outcome["output"], "error": outcome["error"]}
        self._take(call.size)
        events += self._event(f"response.mcp_call.{outcome['status']}", **item.place)
        return events + self._done(item, outcome["status"])

    def _request_approval(self, approval: ApprovalRequest) -> bytes:
        """Add a call that the client has to approve."""
        events, index = self._end_item(), len(self._output)
        item = {
            "id": approval.id,
            "type": REQUEST,
            "arguments": approval.arguments,
            "name": approval.tool.name,
            "server_label": approval.tool.label,
        }
        self._output.append(item)
        self._take(len(approval.arguments))
        for name in ("response.output_item.added", "response.output_item.done"):
            events += self._event(name, output_index=index, item=item)
        return events

    def _end_running_calls(self) -> bytes:
        """End MCP calls that will not run, because the response ends."""
        running, self._running = self._running, {}
        open_id = "" if self._open is None else self._open.id
        items = [item for item in running.values() if item.id != open_id]
        return b"".join([self._done(item, "incomplete") for item in items])

    def _list_tools(self) -> bytes:
        """Add the lists of tools of the request's MCP servers."""
        events = b""
        rounds = self.request.rounds
        for listing in () if rounds is None else rounds.listings:
            item = {"id": f"mcpl_{uuid.uuid4().hex}", **listing}
            place = {"item_id": item["id"], "output_index": len(self._output)}
            self._output.append(item)
            initial = item | {"tools": [], "error": None}
            index = place["output_index"]
            ending = "completed" if listing["error"] is None else "failed"
            events += self._event("response.output_item.added", output_index=index, item=initial)
            events += self._event("response.mcp_list_tools.in_progress", **place)
            events += self._event(f"response.mcp_list_tools.{ending}", **place)
            name = "response.output_item.done"
            events += self._event(name, output_index=index, item=item)
        return events

    def _begin(self, kind: str, fields: dict[str, Any] | None = None) -> bytes:
        events = self._end_item()
        self._open = item = OutputItem(
            kind=kind,
            index=len(self._output),
            fields=fields or {},
            encrypts=ENCRYPTED_REASONING in self.request.params.include,
        )
        body = item.body("in_progress")
        self._output.append(body)
        events += self._event("response.output_item.added", output_index=item.index, item=body)
        if item.is_call:
            return events
        return events + self._event(
            "response.content_part.added", **item.place, part=item.empty_part()
        )

    def _end_item(self) -> bytes:
        """End the current item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        name, text = f"response.{EVENTS[item.kind]}.done", item.text.getvalue()
        if item.is_custom:
            events = self._input(item)
        elif item.is_call:
            fields = {"arguments": text, "name": item.fields["name"]}
            events = self._event(name, **item.place, **fields)
        else:
            logprobs = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = self._event(name, **item.place, text=text, **logprobs)
            name = "response.content_part.done"
            events += self._event(name, **item.place, part=item.part())
        if item.kind == "mcp_call" and self._finish is None:
            return events  # the result follows
        return events + self._done(item, _status(self._finish))

    def _input(self, item: OutputItem) -> bytes:
        """The input of a custom tool, in one event, since the model writes it as a JSON string."""
        name, text = f"response.{EVENTS[item.kind]}", item.input()
        events = self._event(f"{name}.delta", **item.place, delta=text)
        return events + self._event(f"{name}.done", **item.place, input=text)

    def _done(self, item: OutputItem, status: str) -> bytes:
        body = self._output[item.index] = item.body(status)
        name = "response.output_item.done"
        return self._event(name, output_index=item.index, item=body)

    def _logprobs(self) -> list[dict[str, Any]]:
        tokens, self._pending = self._pending, []
        return [self._entries.scored(token) for token in tokens]

    def _take(self, size: int) -> None:
        if self._memory is not None:
            self._memory.take(size)

    def _delta_event(self, item_id: str, number: str, text: str) -> bytes:
        """A text delta of the current item."""
        item = self._open
        assert item is not None and item.id == item_id
        kind = f"response.{EVENTS[item.kind]}.delta"
        value = {"type": kind, "sequence_number": number, **item.place, "delta": text}
        return named_event(kind, value | {"logprobs": []} if item.kind == "message" else value)

    def _body(
        self,
        status: str,
        output: Sequence[dict[str, Any]],
        usage: Usage | None = None,
        error: ApiError | None = None,
    ) -> dict[str, Any]:
        body = response_body(
            self.request, self.request.params, self._created, status, output, usage, error
        )
        if self._raw is None:
            return body
        return body | (self._raw.body() if status in ENDED else NO_MESSAGES)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self.request.stream:
            return b""
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, value)


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"
