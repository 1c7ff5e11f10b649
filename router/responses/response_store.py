"""Responses that clients may read again, or continue."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..errors import ApiError
from .input_items import Item, as_input

# Of all stored texts.
MAX_BYTES = 128 << 20
# Of a response without its text.
RESPONSE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response that has ended. ``conversation`` has the items that a following response
    continues, ``items`` those of this response's own input; ``size`` is in bytes."""

    owner: str
    body: dict[str, Any]
    items: list[Item]
    conversation: list[Item]
    size: int


class ResponseStore:
    """The last responses, for at most ``lifetime`` seconds. Those of one key do not exist for
    others."""

    def __init__(
        self, most: int, lifetime: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._lifetime = lifetime
        self._clock = clock
        self._stored: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self._bytes = 0

    def new_id(self) -> str:
        """An id for a response that is to be stored."""
        return f"resp_{uuid.uuid4().hex}"

    def add(self, response: StoredResponse) -> None:
        """Store a response; the oldest make room."""
        self._stored[response.body["id"]] = response, self._clock() + self._lifetime
        self._bytes += response.size + RESPONSE_BYTES
        while self._stored and self._is_oldest_in_the_way():
            self._remove(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ``ApiError`` 404."""
        found, expires = self._stored.get(response_id, (None, 0.0))
        if found is None or found.owner != owner or expires <= self._clock():
            message = f"Response with id '{response_id[:64]}' not found."
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    def items(self, ids: Collection[str], owner: str) -> dict[str, Item]:
        """The items of these ids, as far as they are stored; of several with one id, the newest.
        Runs in a thread, since there may be many."""
        wanted, found, now = set(ids), dict[str, Item](), self._clock()
        for response, expires in reversed(list(self._stored.values())):
            if not wanted or expires <= now:  # the older ones have expired as well
                break
            if response.owner == owner:
                for item in chain(response.body["output"], reversed(response.items)):
                    if item["id"] in wanted:
                        wanted.remove(item["id"])
                        found[item["id"]] = as_input(item)
        return found

    def delete(self, response_id: str, owner: str) -> None:
        """Raises ``ApiError`` 404."""
        self.get(response_id, owner)
        self._remove(response_id)

    def _is_oldest_in_the_way(self) -> bool:
        _, expires = next(iter(self._stored.values()))
        full = len(self._stored) > self._most or self._bytes > MAX_BYTES
        return full or expires <= self._clock()

    def _remove(self, response_id: str) -> None:
        self._bytes -= self._stored.pop(response_id)[0].size + RESPONSE_BYTES
