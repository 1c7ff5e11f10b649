"""Tool calls that wait for the client's approval, run at most once each."""

from __future__ import annotations

import asyncio
import enum
import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from ..database import Database
from ..errors import ApiError, invalid
from ..state import rows_to_evict
from .server_tools import CallOutcome, ServerTool

MAX_APPROVALS = 4096
# Characters in all stored arguments and outcomes.
MAX_CHARACTERS = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalResponse:
    """A client's response to the approval request ``id``, with the call as the conversation has it.
    ``param`` is its place in the request."""

    id: str
    tool: ServerTool
    arguments: str
    approve: bool
    param: str


class _State(enum.StrEnum):
    WAITING = "waiting"
    CLAIMED = "claimed"  # by a request that responds to it
    FINAL = "answered"


class Approvals:
    """The latest calls that wait for approval or were approved, for at most ``lifetime`` seconds,
    of all routers that share a database. They are visible only to the key that made them. A call
    whose entry was dropped can no longer run."""

    def __init__(
        self, database: Database, lifetime: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._lifetime = lifetime
        self._clock = clock
        self._releasing: set[asyncio.Task[None]] = set()

    def new_id(self) -> str:
        """The id of a new approval request."""
        return f"mcpr_{uuid.uuid4().hex}"

    async def request(self, owner: str, tool: ServerTool, arguments: str) -> str:
        """Store a call until it is approved. Returns the id of the approval request. Raises
        ``ApiError`` 503."""
        approval_id = self.new_id()
        expires, size = self._clock() + self._lifetime, len(arguments)
        call = tool.label, tool.name, arguments

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO approvals"
                " (id, owner, expires, size, state, label, name, arguments)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (approval_id, owner, expires, size, _State.WAITING, *call),
            )
            self._make_room(connection)

        await self._database.run(work)
        return approval_id

    async def claim(self, owner: str, response: ApprovalResponse) -> CallOutcome | None:
        """Reserve an approval for one request, until ``release``. Returns the outcome of a call
        that has already run for a request that failed. Raises ``ApiError`` or ``RequestError``."""

        def work(connection: sqlite3.Connection) -> CallOutcome | None:
            row = connection.execute(
                "SELECT * FROM approvals WHERE id = ? AND owner = ? AND expires > ?",
                (response.id, owner, self._clock()),
            ).fetchone()
            outcome = _check(row, response)
            connection.execute(
                "UPDATE approvals SET state = ? WHERE id = ?", (_State.CLAIMED, response.id)
            )
            return outcome

        return await self._database.run(work)

    async def release(self, approval_id: str, outcome: CallOutcome | None, *, final: bool) -> None:
        """End a claim. If it is ``final``, the approval is used up; otherwise another request may
        respond, and gets the ``outcome`` if the call has run. Raises ``ApiError`` 503."""
        outcome_json = None if outcome is None or final else json.dumps(asdict(outcome))

        def work(connection: sqlite3.Connection) -> None:
            if final:
                connection.execute(
                    "UPDATE approvals SET state = ?, outcome = NULL, arguments = '', size = 0"
                    " WHERE id = ?",
                    (_State.FINAL, approval_id),
                )
                return
            connection.execute(
                "UPDATE approvals SET state = ?, outcome = ?, size = length(arguments) + ?"
                " WHERE id = ?",
                (_State.WAITING, outcome_json, len(outcome_json or ""), approval_id),
            )
            self._make_room(connection)

        await self._database.run(work)

    def spawn(self, release: Coroutine[Any, Any, None]) -> None:
        """Release a claim in the background, once its call has finished."""
        task = asyncio.create_task(release)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Stop. Calls that are still running stay claimed, because it is unknown whether they will
        finish."""
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        dropped = rows_to_evict(
            connection,
            "approvals",
            max_rows=MAX_APPROVALS,
            max_size=MAX_CHARACTERS,
            now=self._clock(),
        )
        connection.executemany("DELETE FROM approvals WHERE number = ?", ((n,) for n in dropped))


def _check(row: sqlite3.Row | None, response: ApprovalResponse) -> CallOutcome | None:
    """The outcome of a call that has already run. Raises ``ApiError`` or ``RequestError`` if the
    response is not acceptable."""
    if row is None:
        message = f"The approval request '{response.id[:64]}' was not found; it may have expired."
        raise ApiError(404, message, param=response.param, code="approval_request_not_found")
    if row["state"] == _State.CLAIMED:
        message = f"Another request is answering the approval request '{response.id[:64]}'."
        raise invalid(message, response.param, "approval_request_in_progress")
    if row["state"] == _State.FINAL or (row["outcome"] and not response.approve):
        message = f"The approval request '{response.id[:64]}' has already been answered."
        raise invalid(message, response.param, "approval_request_answered")
    original = ServerTool(row["label"], row["name"]), row["arguments"]
    if original != (response.tool, response.arguments):
        message = f"The call of the approval request '{response.id[:64]}' is not the original."
        raise invalid(message, response.param, "approval_request_changed")
    return CallOutcome(**json.loads(row["outcome"])) if row["outcome"] else None
