"""Calls that wait until the client approves them, at most once each."""

from __future__ import annotations

import enum
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ApiError, invalid
from .server_tools import CallOutcome, ServerTool

MAX_APPROVALS = 4096
# Of all arguments and outcomes that are kept.
MAX_CHARACTERS = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalAnswer:
    """A client's answer to the request for approval ``id``, with the call as the conversation has
    it. ``param`` is its place in the request."""

    id: str
    tool: ServerTool
    arguments: str
    approve: bool
    param: str


class _ApprovalState(enum.Enum):
    WAITING = enum.auto()
    CLAIMED = enum.auto()  # by a request that answers it
    ANSWERED = enum.auto()


@dataclass(slots=True)
class _Approval:
    """``outcome`` is that of a call which has run for a request that failed later."""

    owner: str
    tool: ServerTool
    arguments: str
    expires: float
    state: _ApprovalState = _ApprovalState.WAITING
    outcome: CallOutcome | None = None

    @property
    def size(self) -> int:
        return len(self.arguments) + len(self.outcome.text if self.outcome else "")


class Approvals:
    """The last calls that wait, or were answered, for at most ``lifetime`` seconds. Those of one
    key do not exist for others. A call that is forgotten can no longer be run."""

    def __init__(self, lifetime: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime = lifetime
        self._clock = clock
        self._approvals: OrderedDict[str, _Approval] = OrderedDict()
        self._characters = 0

    def new_id(self) -> str:
        """An id for a request for approval."""
        return f"mcpr_{uuid.uuid4().hex}"

    def ask(self, owner: str, tool: ServerTool, arguments: str) -> str:
        """Keep a call until it is approved. Returns the id of the request for approval."""
        approval_id = self.new_id()
        approval = _Approval(owner, tool, arguments, self._clock() + self._lifetime)
        self._approvals[approval_id] = approval
        self._characters += approval.size
        self._make_room()
        return approval_id

    async def claim(self, owner: str, answer: ApprovalAnswer) -> CallOutcome | None:
        """Let one request answer, until ``release``. Returns the outcome of a call that has already
        run for a request that failed. Raises ``ApiError`` or ``RequestError``."""
        approval = self._approvals.get(answer.id)
        if approval is None or approval.owner != owner or approval.expires <= self._clock():
            message = f"The approval request '{answer.id[:64]}' was not found; it may have expired."
            raise ApiError(404, message, param=answer.param, code="approval_request_not_found")
        if approval.state is _ApprovalState.CLAIMED:
            message = f"Another request is answering the approval request '{answer.id[:64]}'."
            raise invalid(message, answer.param, "approval_request_in_progress")
        if approval.state is _ApprovalState.ANSWERED or (approval.outcome and not answer.approve):
            message = f"The approval request '{answer.id[:64]}' has already been answered."
            raise invalid(message, answer.param, "approval_request_answered")
        if (approval.tool, approval.arguments) != (answer.tool, answer.arguments):
            message = f"The call of the approval request '{answer.id[:64]}' is not the original."
            raise invalid(message, answer.param, "approval_request_changed")
        approval.state = _ApprovalState.CLAIMED
        return approval.outcome

    def release(self, approval_id: str, outcome: CallOutcome | None, *, answered: bool) -> None:
        """End a claim: the approval is ``answered``, or may be answered again, with the
        ``outcome`` of the call if it has run."""
        approval = self._approvals.get(approval_id)
        if approval is None:
            return  # it has made room
        self._characters -= approval.size
        approval.state, approval.outcome = _ApprovalState.WAITING, outcome
        if answered:
            approval.state, approval.outcome, approval.arguments = _ApprovalState.ANSWERED, None, ""
        self._characters += approval.size
        self._make_room()

    def _make_room(self) -> None:
        while self._approvals and self._is_oldest_in_the_way():
            _, oldest = self._approvals.popitem(last=False)
            self._characters -= oldest.size

    def _is_oldest_in_the_way(self) -> bool:
        oldest = next(iter(self._approvals.values()))
        full = len(self._approvals) > MAX_APPROVALS or self._characters > MAX_CHARACTERS
        return full or oldest.expires <= self._clock()
