"""The store of responses, which clients can retrieve and continue."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..database import Database
from ..errors import ApiError
from ..http.encoding import dump
from ..state import rows_to_evict
from .input_items import Item, as_input

# Sum over all stored responses.
MAX_BYTES = 128 << 20
# Overhead of a response, without its text.
RESPONSE_BYTES = 4096
# A response in progress counts as failed if its router has not reported it for this long.
LOST_SECONDS = 30.0
LOST = {"code": "server_error", "message": "The router that computed the response has ended."}

_COLUMNS = "id, owner, expires, size, status, seen, body, items, earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response that has ended, or is ``in_progress``. ``items`` is its own input; ``earlier`` are
    the items of all responses before."""

    owner: str
    body: dict[str, Any]
    items: list[Item]
    earlier: list[Item]
    in_progress: bool = False

    @property
    def conversation(self) -> list[Item]:
        """The items that precede the input of the next response."""
        return [*self.earlier, *self.items, *self.body["output"]]


class ResponseStore:
    """The latest ``max_responses`` responses of all routers that share a database, for ``lifetime``
    seconds. Each owner can only access its own."""

    def __init__(
        self,
        database: Database,
        max_responses: int,
        lifetime: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._max_responses = max_responses
        self._lifetime = lifetime
        self._clock = clock

    def new_id(self) -> str:
        """An id for a new response."""
        return f"resp_{uuid.uuid4().hex}"

    async def add(self, response: StoredResponse) -> None:
        """Store a response, or replace its earlier state. Evicts the oldest responses if needed.
        Raises ``ApiError`` 503."""
        await self._database.run(lambda connection: self._add(connection, response))

    async def report_progress(self, statuses: Mapping[str, str]) -> list[str]:
        """Record that responses are in progress, with their statuses by id; no-op for one that is
        stored as ended. Returns the ids of those that must be cancelled."""

        def work(connection: sqlite3.Connection) -> list[str]:
            now = self._clock()
            connection.executemany(
                "UPDATE responses SET status = ?, seen = ? WHERE id = ? AND status IS NOT NULL",
                ((status, now, response_id) for response_id, status in statuses.items()),
            )
            cancelled = connection.execute(
                "SELECT id FROM responses"
                " WHERE cancelled AND id IN (SELECT value FROM json_each(?))",
                (json.dumps(list(statuses)),),
            )
            return [row["id"] for row in cancelled]

        return await self._database.run(work)

    async def cancel(self, response_id: str, owner: str) -> None:
        """Request that the router of a response cancels it. Raises ``ApiError`` 404."""

        def work(connection: sqlite3.Connection) -> None:
            number = self._row(connection, response_id, owner)["number"]
            connection.execute("UPDATE responses SET cancelled = 1 WHERE number = ?", (number,))

        await self._database.run(work)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """The response with this id. Raises ``ApiError`` 404."""
        return await self._database.run(
            lambda connection: self._get(connection, response_id, owner)
        )

    def get_in_thread(self, response_id: str, owner: str, param: str) -> StoredResponse:
        """Blocking ``get`` for parser threads; ``param`` is the parameter with the id."""
        return self._database.run_and_wait(
            lambda connection: self._get(connection, response_id, owner, param)
        )

    def items_in_thread(self, ids: Collection[str], owner: str) -> dict[str, Item]:
        """The stored items with these ids; if several have the same id, the newest one."""

        def work(connection: sqlite3.Connection) -> dict[str, Item]:
            rows = connection.execute(
                "SELECT responses.body, responses.items FROM responses WHERE number IN ("
                " SELECT max(number) FROM json_each(?) AS ids"
                " JOIN response_items AS item ON item.id = ids.value"
                " JOIN responses ON number = item.response"
                " WHERE owner = ? AND expires > ? GROUP BY item.id"
                ") ORDER BY number DESC",
                (json.dumps(list(ids)), owner, self._clock()),
            )
            result = dict[str, Item]()
            for row in rows:
                for item in _newest_first(json.loads(row["body"]), json.loads(row["items"])):
                    if item["id"] in ids and item["id"] not in result:
                        result[item["id"]] = as_input(item)
            return result

        return self._database.run_and_wait(work)

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response. Raises ``ApiError`` 404."""

        def work(connection: sqlite3.Connection) -> None:
            row = self._row(connection, response_id, owner)
            _remove(connection, row["number"])

        await self._database.run(work)

    def _add(self, connection: sqlite3.Connection, response: StoredResponse) -> None:
        texts = [dump(each) for each in (response.body, response.items, response.earlier)]
        size = RESPONSE_BYTES + sum(map(len, texts))
        response_id, now = response.body["id"], self._clock()
        state = (response.body["status"], now) if response.in_progress else (None, None)
        values = (response_id, response.owner, now + self._lifetime, size, *state, *texts)
        earlier = connection.execute("SELECT number FROM responses WHERE id = ?", (response_id,))
        for row in earlier.fetchall():
            _remove(connection, row["number"])
        marks = ", ".join("?" * len(values))
        added = connection.execute(f"INSERT INTO responses ({_COLUMNS}) VALUES ({marks})", values)
        ids = [item["id"] for item in _newest_first(response.body, response.items)]
        connection.executemany(
            "INSERT INTO response_items VALUES (?, ?) ON CONFLICT DO NOTHING",
            ((item_id, added.lastrowid) for item_id in ids),
        )
        self._make_room(connection)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        numbers = rows_to_evict(
            connection,
            "responses",
            max_rows=self._max_responses,
            max_size=MAX_BYTES,
            now=self._clock(),
        )
        for number in numbers:
            _remove(connection, number)

    def _get(
        self,
        connection: sqlite3.Connection,
        response_id: str,
        owner: str,
        param: str | None = None,
    ) -> StoredResponse:
        row = self._row(connection, response_id, owner, param)
        body, items, earlier = (json.loads(row[name]) for name in ("body", "items", "earlier"))
        in_progress = False
        if row["status"] is not None:
            in_progress = row["seen"] > self._clock() - LOST_SECONDS
            state = (
                {"status": row["status"]} if in_progress else {"status": "failed", "error": LOST}
            )
            body |= state
        return StoredResponse(
            owner=owner, body=body, items=items, earlier=earlier, in_progress=in_progress
        )

    def _row(
        self,
        connection: sqlite3.Connection,
        response_id: str,
        owner: str,
        param: str | None = None,
    ) -> sqlite3.Row:
        row: sqlite3.Row | None = connection.execute(
            "SELECT * FROM responses WHERE id = ? AND owner = ? AND expires > ?",
            (response_id, owner, self._clock()),
        ).fetchone()
        if row is None:
            message = f"Response with id '{response_id[:64]}' not found."
            raise ApiError(404, message, param=param, code="response_not_found")
        return row


def _remove(connection: sqlite3.Connection, number: int) -> None:
    connection.execute("DELETE FROM response_items WHERE response = ?", (number,))
    connection.execute("DELETE FROM responses WHERE number = ?", (number,))


def _newest_first(body: dict[str, Any], items: list[Item]) -> Iterable[Item]:
    return chain(body["output"], reversed(items))
