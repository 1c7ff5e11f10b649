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
    """Formats the response to a chat with ``tools`` of servers, given by the names that the model
    uses. It has one choice."""

    def __init__(self, request: ChatRequest, created: int, tools: Container[str]) -> None:
        super().__init__(request, created)
        self._tools = tools
        # of the calls that the client runs, by index among all calls
        self._client_indices: dict[int, int] = {}
        self._executed_calls: list[ExecutedCall] = []  # unless the response is streamed

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if delta.calls:
            delta = replace(delta, calls=self._client_calls(delta.calls))
        events = super().chunk(delta)
        if not isinstance(delta, RoundDelta) or not delta.executed_calls:
            return events
        calls = {"mcp_calls": [_executed_call(call) for call in delta.executed_calls]}
        return events + data_event(self._chunk([stream_choice(0, calls)]))

    def collector(self, request: GenerationRequest, memory: MemoryShare) -> ResultCollector:
        return _Collector(request, self, memory, self._executed_calls)

    def _call_fields(self, calls: Sequence[ToolCallResult]) -> dict[str, Any]:
        fields = super()._call_fields([call for call in calls if call.name not in self._tools])
        if self._executed_calls:
            fields["mcp_calls"] = [_executed_call(call) for call in self._executed_calls]
        return fields

    def _client_calls(self, calls: Sequence[CallDelta]) -> list[CallDelta]:
        """The calls that the client runs, renumbered."""
        for call in calls:
            if call.name and call.name not in self._tools:
                self._client_indices[call.index] = len(self._client_indices)
        indices = self._client_indices
        return [replace(c, index=indices[c.index]) for c in calls if c.index in indices]


class _Collector(ResultCollector):
    """Collects the calls that the router has run, too."""

    def __init__(
        self,
        request: GenerationRequest,
        response: McpChatFormatter,
        memory: MemoryShare,
        executed_calls: list[ExecutedCall],
    ) -> None:
        super().__init__(request, response.choice_logprobs, response.prompt_logprobs, memory)
        self._executed_calls = executed_calls

    def add(self, output: Output) -> None:
        super().add(output)
        if isinstance(output, RoundDelta):
            self._executed_calls += output.executed_calls
            self._memory.take(sum(call.size for call in output.executed_calls))


def _executed_call(call: ExecutedCall) -> dict[str, Any]:
    """A call that the router has run, in the shape of OpenAI's Responses API."""
    fields = {
        "id": call.id,
        "type": "mcp_call",
        "server_label": call.tool.label,
        "name": call.tool.name,
        "arguments": call.arguments,
    }
    return fields | call.outcome()
