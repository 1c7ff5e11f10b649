"""The approvals of one request: its responses to earlier approval requests, and new requests."""

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
    """A context manager that claims the approvals of ``responses`` for one request. One that fails
    releases them, with the outcomes of calls that have run."""

    def __init__(
        self, approvals: Approvals, owner: str, responses: Sequence[ApprovalResponse] = ()
    ) -> None:
        self.responses = responses
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
            await asyncio.wait((claiming,))  # claims of a cancelled request continue
            await self._release_all()
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._release_all())

    async def request(self, tool: ServerTool, arguments: str) -> str:
        """Request the approval of a call. Returns the id of the approval request."""
        return await self._approvals.request(self._owner, tool, arguments)

    async def run(
        self, approval_id: str, call: Callable[[], Coroutine[Any, Any, CallOutcome]]
    ) -> CallOutcome:
        """Run an approved call, unless it has already run. It continues if this request is
        cancelled, because it cannot be undone."""
        if (outcome := self._claimed[approval_id]) is not None:
            return outcome
        task = self._running[approval_id] = asyncio.create_task(call())
        return await asyncio.shield(task)

    def settle(self) -> None:
        """Make the responses final: none of them can be given again."""
        self._settled = True

    async def _claim_all(self) -> None:
        for response in self.responses:
            self._claimed[response.id] = await self._approvals.claim(self._owner, response)

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
        with suppress(ApiError):  # logged already; the call does not run again
            await self._approvals.release(approval_id, outcome, final=self._settled)
