"""Stored responses of a router with workers: each is kept by the worker that made it, whose number
is in its id. Another worker that continues one asks for its conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable
from typing import Any

from ...shared.errors import UnavailableError
from ..errors import ApiError
from ..http.encoding import pieces_of
from ..http.slices import TimeSlices
from ..options import RouterOptions
from ..responses.background_runs import BackgroundRuns
from ..responses.input_items import Item
from ..responses.response_store import ResponseStore, StoredResponse
from .process_link import ANSWER_SECONDS, Link, Topic

NO_ITEMS = b"{}"
MARK = 2  # hexadecimal digits at the end of an id


class SharedResponses(ResponseStore):
    """The responses of one worker, and through ``link`` those of the others."""

    def __init__(self, options: RouterOptions, number: int, link: Link) -> None:
        super().__init__(options.max_stored_responses, options.response_lifetime)
        self._number = number
        self._workers = options.router_workers
        self._link = link
        self._loop = asyncio.get_running_loop()

    def new_id(self) -> str:
        return marked(super().new_id(), self._number)

    def keeper_of(self, response_id: str) -> int | None:
        """The number of another worker that may have the response; ``None`` if none does."""
        return number_of(response_id, self._number, self._workers)

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ``ApiError``. Of another worker's response only the conversation is told, in the
        threads that parse requests; other requests are passed on whole."""
        number = self.keeper_of(response_id)
        if number is None or _on(self._loop):
            return super().get(response_id, owner, param)
        told, items = self._ask(Topic.RESPONSE, [number, response_id, owner, param], param)
        return StoredResponse(owner=owner, body={}, items=[], conversation=items, **told)

    def items(self, ids: Collection[str], owner: str) -> dict[str, Item]:
        """Those of this worker and of the others. Runs in the threads that parse requests."""
        found = super().items(ids, owner)
        for number in range(self._workers):
            missing = [item_id for item_id in ids if item_id not in found]
            if missing and number != self._number:
                told, items = self._ask(Topic.ITEMS, [number, missing, owner])
                found |= zip(told.get("ids", ()), items, strict=True)
        return found

    def _ask(
        self, topic: Topic, question: list[Any], param: str | None = None
    ) -> tuple[dict[str, Any], list[Item]]:
        """Another worker's answer. Raises ``ApiError`` if it refuses, or does not answer."""
        asking = self._link.ask(topic, json.dumps(question).encode())
        asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        # Line by line: all at once would stop the other threads.
        head, *lines = asked.result(2 * ANSWER_SECONDS).split(b"\n")
        return unless_refused(json.loads(head), param), [json.loads(line) for line in lines]


def marked(random_id: str, number: int) -> str:
    """An id that ends with the number of its worker."""
    return random_id[:-MARK] + f"{number:0{MARK}x}"


def number_of(marked_id: str, own: int, workers: int) -> int | None:
    """The number in an id, if it is that of another worker."""
    try:
        number = int(marked_id[-MARK:], 16)
    except ValueError:
        return None
    return number if number != own and 0 <= number < workers else None


async def describe_response(store: ResponseStore, runs: BackgroundRuns, question: bytes) -> bytes:
    """The answer to another worker's question."""
    _, response_id, owner, param = json.loads(question)
    try:
        runs.check_ended(response_id, owner, param)
        stored = store.get(response_id, owner, param)
    except ApiError as error:
        return refused(error.status, error.message, error.code)
    return await _told({"size": stored.size}, stored.conversation)


async def describe_items(store: ResponseStore, question: bytes) -> bytes:
    """The items of this worker that another one has asked for."""
    _, ids, owner = json.loads(question)
    found = await asyncio.to_thread(ResponseStore.items, store, ids, owner)
    return await _told({"ids": list(found)}, found.values())


async def _told(fields: dict[str, Any], items: Iterable[Item]) -> bytes:
    """Fields and items as lines of JSON."""
    slices = TimeSlices()
    lines = bytearray(json.dumps(fields).encode())
    for item in items:
        lines += b"\n"
        for piece in pieces_of(item):
            lines += piece
        await slices.checkpoint()
    return bytes(lines)


def refusal_of(error: UnavailableError) -> bytes:
    """The answer when the worker that has the response does not answer."""
    return refused(503, str(error), None)


def refused(status: int, message: str, code: str | None) -> bytes:
    """An answer to another worker that raises ``ApiError`` there."""
    return json.dumps({"status": status, "refused": message, "code": code}).encode()


def unless_refused(told: dict[str, Any], param: str | None) -> dict[str, Any]:
    """Another worker's answer. Raises ``ApiError`` if it is ``refused``."""
    if "refused" in told:
        raise ApiError(told["status"], told["refused"], param=param, code=told["code"])
    return told


def _on(loop: asyncio.AbstractEventLoop) -> bool:
    """True in the thread of the event loop, which must not wait for itself."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
