"""Amounts by name in the last minute, in the windows and storages of the library ``limits``.

A sliding window is two fixed ones: the amount of the present one, and of the one before it the part
that is less than a minute ago, as if it had come evenly.
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
# A limit cannot be checked without its storage, and no request should wait long for that.
STORAGE_SECONDS = 2.0
# More than is ever counted, and exact in Lua.
NO_LIMIT = 1 << 52


@dataclass(frozen=True, slots=True)
class Level:
    """The state of one limit. Times are seconds from now: until all of it is free again, and until
    an amount that was rejected fits."""

    limit: int
    remaining: int
    reset: float
    wait: float


@dataclass(frozen=True, slots=True)
class Window:
    """What was counted under one name. Both times are seconds from now: until the amount counts no
    longer at all."""

    previous: int
    previous_ends: float
    current: int
    current_ends: float

    def level(self, limit: int, amount: int = 0, held: int = 0) -> Level:
        """The state of a limit while ``held`` counts as well; ``amount`` is what is to fit."""
        current = self.current + held
        used = int(self.previous * self.previous_ends / MINUTE) + current
        ends = self.current_ends or 2.0 * MINUTE
        reset = ends if current else self.previous_ends if self.previous else 0.0
        return Level(limit, max(0, limit - used), reset, self._wait(limit - amount, current, ends))

    def _wait(self, most: int, current: int, ends: float) -> float:
        """Seconds until at most ``most`` is counted, if nothing is added; fractions are not."""
        room = most - current
        if room < 0:  # the present window must end, and shrink
            return ends - MINUTE * (most + 1) / current
        if not self.previous:
            return 0.0
        return max(0.0, self.previous_ends - MINUTE * (room + 1) / self.previous)


class MinuteCounts:
    """Counts of this process, or of all that share the storage at ``url``."""

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
                f"--limits-storage needs the package redis, and an address of it: {error}"
            ) from None
        self._errors = cast(Storage, storage).base_exceptions
        self._storage = cast(SlidingWindowCounterSupport, storage)

    async def hit(self, name: str, limit: int) -> bool:
        """Count one; false if that is over the limit. Raises ``UnavailableError``, as all do."""
        return await self._answer(
            self._storage.acquire_sliding_window_entry(name, limit, MINUTE, 1)
        )

    async def count(self, name: str, amount: int) -> None:
        """Count an amount, whatever the limit."""
        if amount:
            await self._answer(
                self._storage.acquire_sliding_window_entry(name, NO_LIMIT, MINUTE, amount)
            )

    async def window(self, name: str) -> Window:
        """What is counted now."""
        return Window(*await self._answer(self._storage.get_sliding_window(name, MINUTE)))

    async def close(self) -> None:
        """Close the connections to the storage."""
        if isinstance(self._storage, RedisStorage):
            assert isinstance(self._storage.bridge, RedispyBridge)
            await self._storage.bridge.storage.aclose()

    async def _answer(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except self._errors as error:
            raise UnavailableError(
                "The limit of this key cannot be checked: the storage of limits does not answer; "
                "try again soon."
            ) from error
