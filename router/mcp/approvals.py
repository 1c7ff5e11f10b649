"""Calls that wait until the client approves them, at most once each."""

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
# Of all arguments and outcomes that are kept.
MAX_CHARACTERS = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalResponse:
    """A client's answer to the request for approval ``id``, with the call as the conversation has
    it. ``param`` is its place in the request."""

    id: str
    tool: ServerTool
    arguments: str
    approve: bool
    param: str


class _State(enum.StrEnum):
    WAITING = "waiting"
    CLAIMED = "claimed"  # by a request that answers it
    ANSWERED = "answered"


class Approvals:
    """The last calls that wait, or were answered, for at most ``lifetime`` seconds, of all routers
    that share a database. Those of one key do not exist for others. A call that is forgotten can no
    longer be run."""

    def __init__(
        self, database: Database, lifetime: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._lifetime = lifetime
        self._clock = clock
        self._releasing: set[asyncio.Task[None]] = set()

    def new_id(self) -> str:
        """An id for a request for approval."""
        return f"mcpr_{uuid.uuid4().hex}"

    async def ask(self, owner: str, tool: ServerTool, arguments: str) -> str:
        """Keep a call until it is approved. Returns the id of the request for approval. Raises
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

    async def claim(self, owner: str, answer: ApprovalResponse) -> CallOutcome | None:
        """Let one request answer, until ``release``. Returns the outcome of a call that has already
        run for a request that failed. Raises ``ApiError`` or ``RequestError``."""

        def work(connection: sqlite3.Connection) -> CallOutcome | None:
            row = connection.execute(
                "SELECT * FROM approvals WHERE id = ? AND owner = ? AND expires > ?",
                (answer.id, owner, self._clock()),
            ).fetchone()
            outcome = _check(row, answer)
            connection.execute(
                "UPDATE approvals SET state = ? WHERE id = ?", (_State.CLAIMED, answer.id)
            )
            return outcome

        return await self._database.run(work)

    async def release(
        self, approval_id: str, outcome: CallOutcome | None, *, answered: bool
    ) -> None:
        """End a claim: the approval is ``answered``, or may be answered again, with the
        ``outcome`` of the call if it has run. Raises ``ApiError`` 503."""
        kept = None if outcome is None or answered else json.dumps(asdict(outcome))

        def work(connection: sqlite3.Connection) -> None:
            if answered:
                connection.execute(
                    "UPDATE approvals SET state = ?, outcome = NULL, arguments = '', size = 0"
                    " WHERE id = ?",
                    (_State.ANSWERED, approval_id),
                )
                return
            connection.execute(
                "UPDATE approvals SET state = ?, outcome = ?, size = length(arguments) + ?"
                " WHERE id = ?",
                (_State.WAITING, kept, len(kept or ""), approval_id),
            )
            self._make_room(connection)

        await self._database.run(work)

    def spawn(self, release: Coroutine[Any, Any, None]) -> None:
        """Release a call that is still running once it has ended."""
        task = asyncio.create_task(release)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Leave calls that are still running claimed: it is not known whether they will run."""
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        gone = rows_to_evict(
            connection,
            "approvals",
            max_rows=MAX_APPROVALS,
            max_size=MAX_CHARACTERS,
            now=self._clock(),
        )
        connection.executemany("DELETE FROM approvals WHERE number = ?", ((n,) for n in gone))


def _check(row: sqlite3.Row | None, answer: ApprovalResponse) -> CallOutcome | None:
    """The outcome of a call that has run already, if the answer may be given."""
    if row is None:
        message = f"The approval request '{answer.id[:64]}' was not found; it may have expired."
        raise ApiError(404, message, param=answer.param, code="approval_request_not_found")
    if row["state"] == _State.CLAIMED:
        message = f"Another request is answering the approval request '{answer.id[:64]}'."
        raise invalid(message, answer.param, "approval_request_in_progress")
    if row["state"] == _State.ANSWERED or (row["outcome"] and not answer.approve):
        message = f"The approval request '{answer.id[:64]}' has already been answered."
        raise invalid(message, answer.param, "approval_request_answered")
    asked = ServerTool(row["label"], row["name"]), row["arguments"]
    if asked != (answer.tool, answer.arguments):
        message = f"The call of the approval request '{answer.id[:64]}' is not the original."
        raise invalid(message, answer.param, "approval_request_changed")
    return CallOutcome(**json.loads(row["outcome"])) if row["outcome"] else None
