"""A response in OpenAI's shape, whole and as the events of a stream: items in the order in which
the model writes them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...shared.text.output import CallDelta
from ..errors import ApiError
from ..generation import ChoiceDelta, GenerationRequest, Output, RequestAdmitted, ScoredToken
from ..http.memory_budget import MemoryShare
from ..http.sse import named_event
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
from .tools import CalledTool

# Called with the body of a response that has ended.
Store = Callable[[dict[str, Any]], Awaitable[None]]


class ResponsesFormatter(ResponseFormatter):
    """Formats one response. Its output is kept, whether it is streamed or not: the last event has
    all of it. Without a stream no events are written."""

    def __init__(
        self,
        request: ResponseRequest,
        created: int,
        store: Store,
    ) -> None:
        self.request = request
        self._created = created
        self._asked = request.asked
        self._store = store
        self.begun_status = "queued"
        self._entries = TokenEntries(request.model.tokenizer, token_names(request))
        self._memory: MemoryShare | None = None
        self._number = 0
        self._raw = RawMessages(request) if request.asked.enable_response_messages else None
        self._open: OutputItem | None = None  # what is being written
        self._output: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._running: dict[str, OutputItem] = {}  # calls whose results follow, by their ids
        self._held: list[ScoredToken] = []  # tokens without text so far
        self._deltas = StampedTemplates(self._delta_event)
        self._whole: dict[str, Any] | None = None  # once it has ended

    # ---- of any response ---------------------------------------------------------------------

    def hold(self, memory: MemoryShare) -> None:
        self._memory = memory

    def collector(self, request: GenerationRequest, memory: MemoryShare) -> ResponsesFormatter:
        self.hold(memory)
        return self

    def add(self, output: Output) -> None:
        match output:
            case RequestAdmitted() if self.begun_status == "queued":  # by the first node
                self.begun_status = "in_progress"
                self._listed()
            case ChoiceDelta():
                self.chunk(output)

    def result(self, usage: Usage) -> GenerationResult:
        """A result without the output, which is kept here."""
        return GenerationResult([], usage=usage)

    def so_far(self) -> dict[str, Any]:
        """The response in progress, with the items that are complete."""
        return self._body(self.begun_status, self._output)

    def abandoned(self, error: ApiError | None) -> None:
        """End a response in the background: with an error, or because it is cancelled. No-op if it
        has just ended."""
        if self._whole is not None:
            return
        self._finish = "length"  # no item is complete
        self._ended()
        self._unanswered()
        status = "cancelled" if error is None else "failed"
        self._whole = self._body(status, self._output, error=error)

    async def keep(self) -> None:
        assert self._whole is not None
        await self._store(self._whole)

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        return self._end(result.usage)[1]

    # ---- the events of a stream --------------------------------------------------------------

    def opening(self) -> bytes:
        body = self._body("in_progress", [])
        events = self._event("response.created", response=body)
        events += self._event("response.in_progress", response=body)
        return events + self._listed()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if self._raw is not None:
            if isinstance(delta, RoundDelta) and delta.next_request is not None:
                self._raw.begin(delta.next_request)
            self._take(self._raw.take(delta.tokens))
        return self._items(delta)

    def _items(self, delta: ChoiceDelta) -> bytes:
        """The events of the items that a delta belongs to."""
        events = b""
        if delta.reasoning:
            self._held.clear()
            if self.request.include_reasoning:
                events += self._written("reasoning", delta.reasoning)
        if self.request.logprobs is not None and not delta.reasoning and not delta.calls:
            self._held += delta.scored
        if delta.text:
            events += self._written("message", delta.text, self._scored())
        for call in delta.calls:
            self._held.clear()
            events += self._called(call)
        if isinstance(delta, RoundDelta):
            for executed in delta.executed_calls:
                events += self._executed(executed)
            for asked in delta.approval_requests:
                events += self._asked_for(asked)
        self._finish = delta.finish_reason or self._finish
        return events

    def closing(self, usage: Usage) -> bytes:
        events, body = self._end(usage)
        kind = f"response.{body['status']}"
        return events + self._event(kind, response=body)

    def _end(self, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        events = self._unanswered()
        spoken = any(item["type"] != "mcp_list_tools" for item in self._output)
        events += b"" if spoken else self._begun("message")
        events += self._ended()
        status = _status(self._finish)
        self._whole = body = self._body(status, self._output, usage)
        return events, body

    def _written(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """New text of an item, which begins and ends others where necessary."""
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._begun(kind)
        item = self._open
        assert item is not None
        if not logprobs:
            return events + self._delta(item, text)
        before = len(item.logprobs)
        item.logprobs.extend(logprobs)
        self._take(len(text) + len(item.logprobs) - before)
        item.written.write(text)
        fields: dict[str, Any] = {"delta": text, "logprobs": list(logprobs)}
        return events + self._event(f"response.{EVENTS[kind]}.delta", **item.place, **fields)

    def _called(self, call: CallDelta) -> bytes:
        """New arguments of a call, the first with its name."""
        events = b""
        if call.name:
            events = self._begun_call(call)
        item = self._open
        assert item is not None
        return events + self._delta(item, call.arguments) if call.arguments else events

    def _delta(self, item: OutputItem, text: str) -> bytes:
        """New text or arguments of an item."""
        self._take(len(text))
        item.written.write(text)
        if not self.request.stream or item.is_custom:
            return b""
        number, self._number = self._number, self._number + 1
        return self._deltas.fill(item.id, b"%d" % number, text)

    def _begun_call(self, call: CallDelta) -> bytes:
        rounds = self.request.rounds
        tool = None if rounds is None else rounds.tools.get(call.name)
        if tool is None:
            return self._begun_of_client(call)
        approval = call.id if rounds is not None and call.id in rounds.approved else None
        about = {"server_label": tool.label, "name": tool.name, "approval_request_id": approval}
        events = self._begun("mcp_call", about | {"output": None, "error": None})
        item = self._open
        assert item is not None
        self._running[call.id] = item
        return events + self._event("response.mcp_call.in_progress", **item.place)

    def _begun_of_client(self, call: CallDelta) -> bytes:
        """A call that the client runs, by the name that it knows."""
        tool = self.request.called.get(call.name, CalledTool(call.name))
        about = {"call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            about["namespace"] = tool.namespace
        return self._begun("custom_tool_call" if tool.custom else "function_call", about)

    def _executed(self, call: ExecutedCall) -> bytes:
        """The result of a call that the router has run."""
        events = self._ended()
        item = self._running.pop(call.id)
        outcome = call.outcome()
        item.about |= {"output": outcome["output"], "error": outcome["error"]}
        self._take(call.size)
        events += self._event(f"response.mcp_call.{outcome['status']}", **item.place)
        return events + self._done(item, outcome["status"])

    def _asked_for(self, asked: ApprovalRequest) -> bytes:
        """A call that the client has to approve."""
        events, index = self._ended(), len(self._output)
        item = {
            "id": asked.id,
            "type": REQUEST,
            "arguments": asked.arguments,
            "name": asked.tool.name,
            "server_label": asked.tool.label,
        }
        self._output.append(item)
        self._take(len(asked.arguments))
        for name in ("response.output_item.added", "response.output_item.done"):
            events += self._event(name, output_index=index, item=item)
        return events

    def _unanswered(self) -> bytes:
        """The end of calls that are not run, because the response ends."""
        running, self._running = self._running, {}
        open_id = "" if self._open is None else self._open.id
        ended = [item for item in running.values() if item.id != open_id]
        return b"".join([self._done(item, "incomplete") for item in ended])

    def _listed(self) -> bytes:
        """The tools of the servers that the request names."""
        events = b""
        rounds = self.request.rounds
        for listing in () if rounds is None else rounds.listings:
            item = {"id": f"mcpl_{uuid.uuid4().hex}", **listing}
            place = {"item_id": item["id"], "output_index": len(self._output)}
            self._output.append(item)
            begun = item | {"tools": [], "error": None}
            index = place["output_index"]
            ending = "completed" if listing["error"] is None else "failed"
            events += self._event("response.output_item.added", output_index=index, item=begun)
            events += self._event("response.mcp_list_tools.in_progress", **place)
            events += self._event(f"response.mcp_list_tools.{ending}", **place)
            name = "response.output_item.done"
            events += self._event(name, output_index=index, item=item)
        return events

    def _begun(self, kind: str, about: dict[str, Any] | None = None) -> bytes:
        events = self._ended()
        encrypts = ENCRYPTED_REASONING in self._asked.include
        item = OutputItem(kind=kind, index=len(self._output), about=about or {}, encrypts=encrypts)
        self._open = item
        body = item.body("in_progress")
        self._output.append(body)
        events += self._event("response.output_item.added", output_index=item.index, item=body)
        if item.is_call:
            return events
        return events + self._event(
            "response.content_part.added", **item.place, part=item.empty_part()
        )

    def _ended(self) -> bytes:
        """The end of the item that is being written, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        name, text = f"response.{EVENTS[item.kind]}.done", item.written.getvalue()
        if item.is_custom:
            events = self._input(item)
        elif item.is_call:
            about = {"arguments": text, "name": item.about["name"]}
            events = self._event(name, **item.place, **about)
        else:
            scored = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = self._event(name, **item.place, text=text, **scored)
            name = "response.content_part.done"
            events += self._event(name, **item.place, part=item.part())
        if item.kind == "mcp_call" and self._finish is None:
            return events  # its result follows
        return events + self._done(item, _status(self._finish))

    def _input(self, item: OutputItem) -> bytes:
        """The input of a custom tool, whole: it comes as a string of JSON."""
        name, text = f"response.{EVENTS[item.kind]}", item.input()
        events = self._event(f"{name}.delta", **item.place, delta=text)
        return events + self._event(f"{name}.done", **item.place, input=text)

    def _done(self, item: OutputItem, status: str) -> bytes:
        body = self._output[item.index] = item.body(status)
        name = "response.output_item.done"
        return self._event(name, output_index=item.index, item=body)

    def _scored(self) -> list[dict[str, Any]]:
        held, self._held = self._held, []
        return [self._entries.scored(token) for token in held]

    def _take(self, size: int) -> None:
        if self._memory is not None:
            self._memory.take(size)

    def _delta_event(self, item_id: str, number: str, text: str) -> bytes:
        """An event of the open item."""
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
        body = response_body(self.request, self._asked, self._created, status, output, usage, error)
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
