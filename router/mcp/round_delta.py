"""What a round adds to the output of the model: calls that the router runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..generation import ChoiceDelta
from ..openai.chat_request import ChatRequest
from .server_tools import ServerTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedCall:
    """A call that the router has run: either its ``output`` or its ``error`` is set."""

    id: str
    tool: ServerTool
    arguments: str
    output: str | None = None
    error: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """About as many bytes as it takes in a response."""
        error = self.error or {}
        texts = [part["text"] for part in error.get("content", ())]
        told = (self.output or "", str(error.get("message", "")), *texts)
        return len(self.arguments) + sum(map(len, told))

    def outcome(self) -> dict[str, Any]:
        """The fields of the call in a response that say how it ended."""
        status = "completed" if self.error is None else "failed"
        return {"status": status, "output": self.output, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest:
    """A call that the router runs once the client has approved it, in a later request."""

    id: str
    tool: ServerTool
    arguments: str


@dataclass(slots=True)
class RoundDelta(ChoiceDelta):
    """Output that is not the model's: a later generation ``began``, calls were ``executed``, or the
    client is ``asked`` to approve them."""

    began: ChatRequest | None = None
    executed: Sequence[ExecutedCall] = ()
    asked: Sequence[ApprovalRequest] = ()
