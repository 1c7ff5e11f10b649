"""Chat completions with calls that the router has run: ``mcp_calls`` in messages and chunks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from ...shared.text.output import CallDelta
from ..generation import ChoiceDelta, GenerationRequest, Output
from ..http.encoding import data_event
from ..http.memory_budget import MemoryShare
from ..openai.chat_formatter import ChatFormatter, stream_choice
from ..openai.chat_request import ChatRequest
from ..result import ResultCollector, ToolCallResult
from .round_delta import ExecutedCall, RoundDelta


class McpChatFormatter(ChatFormatter):
    """Formats the response to a chat with the ``tools`` of servers, by the model's names of them.
    It has one choice."""

    def __init__(self, request: ChatRequest, created: int, tools: Container[str]) -> None:
        super().__init__(request, created)
        self._tools = tools
        self._numbers: dict[int, int] = {}  # of the client's calls among all of them
        self._executed: list[ExecutedCall] = []  # of a response that is not streamed

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if delta.calls:
            delta = replace(delta, calls=self._clients(delta.calls))
        events = super().chunk(delta)
        if not isinstance(delta, RoundDelta) or not delta.executed:
            return events
        calls = {"mcp_calls": [_executed(call) for call in delta.executed]}
        return events + data_event(self._chunk([stream_choice(0, calls)]))

    def collector(self, request: GenerationRequest, memory: MemoryShare) -> ResultCollector:
        return _Collector(request, self, memory, self._executed)

    def _called(self, calls: Sequence[ToolCallResult]) -> dict[str, Any]:
        fields = super()._called([call for call in calls if call.name not in self._tools])
        if self._executed:
            fields["mcp_calls"] = [_executed(call) for call in self._executed]
        return fields

    def _clients(self, calls: Sequence[CallDelta]) -> list[CallDelta]:
        """The calls that the client runs, by their own numbers."""
        for call in calls:
            if call.name and call.name not in self._tools:
                self._numbers[call.index] = len(self._numbers)
        numbers = self._numbers
        return [replace(c, index=numbers[c.index]) for c in calls if c.index in numbers]


class _Collector(ResultCollector):
    """Collects the calls that the router has run too."""

    def __init__(
        self,
        request: GenerationRequest,
        response: McpChatFormatter,
        memory: MemoryShare,
        executed: list[ExecutedCall],
    ) -> None:
        super().__init__(request, response.choice_logprobs, response.prompt_logprobs, memory)
        self._executed = executed
        self._held = memory

    def add(self, output: Output) -> None:
        super().add(output)
        if isinstance(output, RoundDelta):
            self._executed += output.executed
            self._held.take(sum(call.size for call in output.executed))


def _executed(call: ExecutedCall) -> dict[str, Any]:
    """A call that the router has run, in the shape of OpenAI's Responses API."""
    named = {"server_label": call.tool.label, "name": call.tool.name}
    head = {"id": call.id, "type": "mcp_call", **named, "arguments": call.arguments}
    return head | call.outcome()
