"""Amounts by name in the last minute, counted by the library ``limits``.

Its sliding window is two fixed ones: the amount of the current minute, and a share of the previous
minute's, which is assumed to be spread evenly.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar, cast

from limits.aio.storage import RedisStorage, SlidingWindowCounterSupport, Storage
from limits.aio.storage.redis.redispy import RedispyBridge
from limits.errors import ConfigurationError
from limits.storage import storage_from_string

from ...shared.errors import UnavailableError, UsageError

T = TypeVar("T")

MINUTE = 60
IN_MEMORY = "async+memory://"
PREFIX = "tandem-limits"
# Timeout of the storage. No limit can be checked without it, so requests then fail.
STORAGE_SECONDS = 2.0
# More than any count, and an exact number in Lua.
NO_LIMIT = 1 << 52


@dataclass(frozen=True, slots=True)
class Level:
    """The state of one limit. ``reset`` is the seconds until all of it is free again, ``wait`` the
    seconds until a rejected amount fits."""

    limit: int
    remaining: int
    reset: float
    wait: float


@dataclass(frozen=True, slots=True)
class Window:
    """The amounts counted under one name. The times are seconds from now until an amount no longer
    counts at all."""

    previous: int
    previous_ends: float
    current: int
    current_ends: float

    def level(self, limit: int, amount: int = 0, reserved: int = 0) -> Level:
        """The state of a limit. ``reserved`` counts as used; ``amount`` is about to be added."""
        current = self.current + reserved
        total = int(self.previous * self.previous_ends / MINUTE) + current
        ends = self.current_ends or 2.0 * MINUTE
        reset = ends if current else self.previous_ends if self.previous else 0.0
        return Level(limit, max(0, limit - total), reset, self._wait(limit - amount, current, ends))

    def _wait(self, target: int, current: int, ends: float) -> float:
        """Seconds until the count, rounded down, is at most ``target`` if nothing is added."""
        room = target - current
        if room < 0:  # the current window must become the previous one, and shrink
            return ends - MINUTE * (target + 1) / current
        if not self.previous:
            return 0.0
        return max(0.0, self.previous_ends - MINUTE * (room + 1) / self.previous)


class MinuteCounts:
    """Counts of this process, or of all processes that share the storage at ``url``."""

    def __init__(self, url: str | None) -> None:
        """Raises ``UsageError`` for a storage that cannot be used."""
        options: dict[str, float | str] = {}
        if url is not None:
            options = {
                "implementation": "redispy",
                "key_prefix": PREFIX,
                "socket_timeout": STORAGE_SECONDS,
                "socket_connect_timeout": STORAGE_SECONDS,
            }
        try:
            storage = storage_from_string(IN_MEMORY if url is None else f"async+{url}", **options)
        except (ConfigurationError, ValueError) as error:
            raise UsageError(
                f"--limits-storage needs the package redis, and the URL of a server: {error}"
            ) from None
        self._errors = cast(Storage, storage).base_exceptions
        self._storage = cast(SlidingWindowCounterSupport, storage)

    async def hit(self, name: str, limit: int) -> bool:
        """Count one; false if that is over the limit. Like the other methods, raises
        ``UnavailableError`` if the storage fails."""
        return await self._result(
            self._storage.acquire_sliding_window_entry(name, limit, MINUTE, 1)
        )

    async def count(self, name: str, amount: int) -> None:
        """Count an amount, whatever the limit."""
        if amount:
            await self._result(
                self._storage.acquire_sliding_window_entry(name, NO_LIMIT, MINUTE, amount)
            )

    async def window(self, name: str) -> Window:
        """The current amounts under a name."""
        return Window(*await self._result(self._storage.get_sliding_window(name, MINUTE)))

    async def close(self) -> None:
        """Close the connections to the storage."""
        if isinstance(self._storage, RedisStorage):
            assert isinstance(self._storage.bridge, RedispyBridge)
            await self._storage.bridge.storage.aclose()

    async def _result(self, operation: Awaitable[T]) -> T:
        try:
            return await operation
        except self._errors as error:
            raise UnavailableError(
                "The limit of this key cannot be checked: the storage of limits does not respond; "
                "try again soon."
            ) from error
