"""The approvals of one request: those that it answers, and those that it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ApiError
from .approvals import ApprovalResponse, Approvals
from .server_tools import CallOutcome, ServerTool

INTERRUPTED = "The call was interrupted; it is not known whether it ran."


class RequestApprovals:
    """A context manager around the time in which no other request may give the same ``answers``. A
    request that fails gives them back, with the outcomes of calls that have run."""

    def __init__(
        self, approvals: Approvals, owner: str, answers: Sequence[ApprovalResponse] = ()
    ) -> None:
        self.answers = answers
        self._approvals = approvals
        self._owner = owner
        self._claimed: dict[str, CallOutcome | None] = {}
        self._running: dict[str, asyncio.Task[CallOutcome]] = {}
        self._settled = False

    async def __aenter__(self) -> None:
        claiming = asyncio.create_task(self._claim_all())
        try:
            await asyncio.shield(claiming)
        except BaseException:
            await asyncio.wait((claiming,))  # a request that is cancelled goes on claiming
            await self._release_all()
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._release_all())

    async def ask(self, tool: ServerTool, arguments: str) -> str:
        """Ask for the approval of a call. Returns the id of the request for it."""
        return await self._approvals.ask(self._owner, tool, arguments)

    async def run(
        self, approval_id: str, call: Callable[[], Coroutine[Any, Any, CallOutcome]]
    ) -> CallOutcome:
        """Run an approved call, unless it has run already. It goes on if this request is cancelled,
        because it cannot be undone."""
        if (known := self._claimed[approval_id]) is not None:
            return known
        task = self._running[approval_id] = asyncio.create_task(call())
        return await asyncio.shield(task)

    def settle(self) -> None:
        """The answers have had their effect: none of them can be given again."""
        self._settled = True

    async def _claim_all(self) -> None:
        for answer in self.answers:
            self._claimed[answer.id] = await self._approvals.claim(self._owner, answer)

    async def _release_all(self) -> None:
        for approval_id in self._claimed:
            task = self._running.get(approval_id)
            if task is None or task.done():
                await self._release(approval_id, task)
            else:
                self._approvals.spawn(self._release_later(approval_id, task))

    async def _release_later(self, approval_id: str, task: asyncio.Task[CallOutcome]) -> None:
        await asyncio.wait((task,))
        await self._release(approval_id, task)

    async def _release(self, approval_id: str, task: asyncio.Task[CallOutcome] | None) -> None:
        outcome = self._claimed[approval_id]
        if task is not None:
            lost = task.cancelled() or task.exception() is not None
            outcome = CallOutcome(text=INTERRUPTED, failed=True) if lost else task.result()
        with suppress(ApiError):  # it has been logged; the call is not run again
            await self._approvals.release(approval_id, outcome, answered=self._settled)
