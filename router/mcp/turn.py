"""One turn of the model: its output, and the message that continues the chat."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

from ...shared.text.output import CallDelta
from ..generation import ChoiceDelta, Output, RequestAdmitted


@dataclass(slots=True)
class TurnCall:
    """One tool call of a turn."""

    id: str
    name: str
    arguments: StringIO = field(default_factory=StringIO)


class ModelTurn:
    """Collects the output of one generation. Its calls are numbered after ``before`` calls of
    earlier turns. Calls of ``guarded`` tools are not passed on, because they wait for an
    approval."""

    def __init__(self, before: int, guarded: Container[str] = ()) -> None:
        self._before = before
        self._guarded = guarded
        self.calls: list[TurnCall] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self.tokens = 0
        self._text = StringIO()
        self._reasoning = StringIO()

    def take(self, outputs: Sequence[Output], *, first: bool) -> list[Output]:
        """Collect output. Returns it as part of the whole response, which is admitted with the
        ``first`` turn and continues after this one."""
        return [
            self._take_delta(output) if isinstance(output, ChoiceDelta) else output
            for output in outputs
            if first or not isinstance(output, RequestAdmitted)
        ]

    def _take_delta(self, delta: ChoiceDelta) -> ChoiceDelta:
        self._text.write(delta.text)
        self._reasoning.write(delta.reasoning)
        self.tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        calls = [call for call in map(self._take_call, delta.calls) if call is not None]
        return replace(delta, calls=calls, finish_reason=None)

    def end(self, *, all_run: bool) -> ChoiceDelta:
        """The finish of the response, unless another turn follows. If the router has handled all
        calls (``all_run``), the finish reason is not "tool_calls", as the client has none to
        run."""
        reason = self._finish_reason
        if reason == "tool_calls" and all_run:
            reason = "stop"
        return ChoiceDelta(0, finish_reason=reason, stop_reason=self._stop_reason)

    def _take_call(self, call: CallDelta) -> CallDelta | None:
        if call.index == len(self.calls):
            self.calls.append(TurnCall(call.id, call.name))
        collected = self.calls[call.index]
        collected.arguments.write(call.arguments)
        if collected.name in self._guarded:
            return None
        return replace(call, index=self._before + call.index)

    def message(self) -> dict[str, Any]:
        """The turn as a message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text.getvalue()}
        if reasoning := self._reasoning.getvalue():
            message["reasoning_content"] = reasoning
        message["tool_calls"] = [_tool_call(call) for call in self.calls]
        return message


def _tool_call(call: TurnCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments.getvalue()}
    return {"id": call.id, "type": "function", "function": function}
