"""Approvals of a router with workers: each is kept by the worker that asked for it, whose number is
in its id. Another worker that gets the answer claims it there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

from ...shared.errors import RequestError, UnavailableError
from ...shared.telemetry.logs import logger
from ..errors import ApiError
from ..mcp.approvals import ApprovalAnswer, Approvals
from ..mcp.server_tools import CallOutcome
from ..options import RouterOptions
from .process_link import Link, Topic
from .shared_responses import marked, number_of, refused, unless_refused

log = logger("router")


class SharedApprovals(Approvals):
    """The approvals of one worker, and through ``link`` those of the others."""

    def __init__(self, options: RouterOptions, number: int, link: Link) -> None:
        super().__init__(options.response_lifetime)
        self._number = number
        self._workers = options.router_workers
        self._link = link
        self._releases: set[asyncio.Task[None]] = set()

    def new_id(self) -> str:
        return marked(super().new_id(), self._number)

    async def claim(self, owner: str, answer: ApprovalAnswer) -> CallOutcome | None:
        number = self._keeper_of(answer.id)
        if number is None:
            return await super().claim(owner, answer)
        asked = {"owner": owner, "answer": asdict(answer)}
        told = unless_refused(await self._ask(number, asked), answer.param)
        return told["outcome"] and CallOutcome(**told["outcome"])

    def release(self, approval_id: str, outcome: CallOutcome | None, *, answered: bool) -> None:
        number = self._keeper_of(approval_id)
        if number is None:
            super().release(approval_id, outcome, answered=answered)
            return
        fields = {"id": approval_id, "outcome": outcome and asdict(outcome), "answered": answered}
        task = asyncio.create_task(self._release(number, fields))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, number: int, fields: dict[str, Any]) -> None:
        """Without an answer the claim stays until it expires, and the call is not run again."""
        try:
            reason = (await self._ask(number, fields)).get("refused")
        except UnavailableError as error:
            reason = str(error)
        if reason:
            log.warning("an approval stays claimed: %s", reason)

    def _keeper_of(self, approval_id: str) -> int | None:
        return number_of(approval_id, self._number, self._workers)

    async def _ask(self, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        question = json.dumps([number, fields]).encode()
        told: dict[str, Any] = json.loads(await self._link.ask(Topic.APPROVAL, question))
        return told


async def take_answer(approvals: Approvals, question: bytes) -> bytes:
    """The answer to another worker's claim or release."""
    _, fields = json.loads(question)
    if "id" in fields:
        outcome = fields["outcome"] and CallOutcome(**fields["outcome"])
        approvals.release(fields["id"], outcome, answered=fields["answered"])
        return b"{}"
    try:
        answer = ApprovalAnswer.from_fields(fields["answer"])
        known = await approvals.claim(fields["owner"], answer)
    except ApiError as error:
        return refused(error.status, str(error), error.code)
    except RequestError as error:
        return refused(400, str(error), error.code)
    return json.dumps({"outcome": known and asdict(known)}).encode()
