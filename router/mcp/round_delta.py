"""What a round adds to the output of the model: tool calls that the router runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..generation import ChoiceDelta
from ..openai.chat_request import ChatRequest
from .server_tools import ServerTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedCall:
    """A tool call that the router has run: either ``output`` or ``error`` is set."""

    id: str
    tool: ServerTool
    arguments: str
    output: str | None = None
    error: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """Its approximate size in a response, in bytes."""
        error = self.error or {}
        parts = [part["text"] for part in error.get("content", ())]
        texts = (self.arguments, self.output or "", str(error.get("message", "")), *parts)
        return sum(map(len, texts))

    def outcome(self) -> dict[str, Any]:
        """The fields of the call in a response that describe its outcome."""
        status = "completed" if self.error is None else "failed"
        return {"status": status, "output": self.output, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest:
    """A tool call that the router runs in a later request, once the client has approved it."""

    id: str
    tool: ServerTool
    arguments: str


@dataclass(slots=True)
class RoundDelta(ChoiceDelta):
    """Output that is not the model's: the request of the next generation, calls that the router has
    run, and calls that wait for the client's approval."""

    next_request: ChatRequest | None = None
    executed_calls: Sequence[ExecutedCall] = ()
    approval_requests: Sequence[ApprovalRequest] = ()
