"""Rate limits of a key: requests and tokens per minute, with OpenAI's headers and errors."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from ...shared.errors import UnavailableError
from ...shared.telemetry.logs import logger
from ..errors import ApiError
from ..http.access_log import AccessRecord
from ..http.exchange import KeyOwner
from ..options import RouterOptions
from .key_usage import KeyUsage

if TYPE_CHECKING:
    from .minute_counts import Level, MinuteCounts

log = logger("router")

REQUESTS, TOKENS = "requests", "tokens"
SHORT = {REQUESTS: "RPM", TOKENS: "TPM"}


class LimitedRequest(Protocol):
    """A request, and the headers of its response."""

    owner: KeyOwner
    access: AccessRecord
    headers: list[tuple[bytes, bytes]]


class RateLimits:
    """The limits of all keys. Admins and clients without a key have none.

    Tokens count once they are used. Tokens that requests in progress may still use are reserved in
    this router only; routers that share its storage do not see the reservations."""

    def __init__(self, options: RouterOptions, usage: KeyUsage) -> None:
        """Raises ``UsageError`` for a storage that cannot be used."""
        self._options = options
        self._usage = usage
        self._counts: MinuteCounts | None = None
        self._reserved: Counter[str] = Counter()  # tokens, by name
        self._settling: set[asyncio.Task[None]] = set()
        if options.requests_per_minute or options.tokens_per_minute or options.limits_storage:
            self._minute()  # create it now, not for the first request

    async def count_request(self, exchange: LimitedRequest) -> None:
        """Count a request. Raises ``ApiError`` 429 if its key is over the limit,
        ``UnavailableError`` if that cannot be checked."""
        limit = self._limit(exchange, REQUESTS)
        if limit is None:
            return
        name, minute = f"{REQUESTS}/{exchange.owner.name}", self._minute()
        fits = await minute.hit(name, limit)
        window = await minute.window(name)
        if not fits:
            raise self._refusal(exchange, REQUESTS, window.level(limit, 1), 1)
        self._show(exchange, REQUESTS, window.level(limit))

    async def reserve(
        self, exchange: LimitedRequest, prompt: int, output: int
    ) -> AbstractContextManager[None]:
        """Reserve the tokens of a prompt and of the longest output. When the returned context ends,
        the tokens that were used are counted instead. Raises ``ApiError`` 429 if the key has too
        few tokens left, ``UnavailableError`` if that cannot be checked."""
        limit = self._limit(exchange, TOKENS)
        if limit is None:
            return nullcontext()
        if prompt > limit:
            raise self._too_long(exchange, prompt, limit)
        # Capped: otherwise a request without ``max_tokens`` could never fit.
        amount = min(prompt + output, limit)
        name = f"{TOKENS}/{exchange.owner.name}"
        before = self._reserved[name]
        self._reserved[name] += amount
        try:
            window = await self._minute().window(name)
            level = window.level(limit, amount, before)
            if level.remaining < amount:
                raise self._refusal(exchange, TOKENS, level, amount)
        except BaseException:
            self._release(name, amount)
            raise
        self._show(exchange, TOKENS, window.level(limit, reserved=before + amount))
        return self._reservation(exchange.access, name, amount)

    @contextmanager
    def _reservation(self, access: AccessRecord, name: str, amount: int) -> Iterator[None]:
        try:
            yield
        finally:
            # In a task, since the request may have been cancelled.
            task = asyncio.create_task(self._settle(name, amount, access.tokens))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle(self, name: str, amount: int, used: int) -> None:
        """Count the used tokens, and end the reservation."""
        try:
            await self._minute().count(name, used)
        except UnavailableError:
            log.warning("%d tokens are not counted: the storage of limits does not respond", used)
        finally:
            self._release(name, amount)

    async def close(self) -> None:
        """Wait until the used tokens are counted, then close the connections to the storage."""
        if self._settling:
            await asyncio.wait(tuple(self._settling))
        if self._counts is not None:
            await self._counts.close()

    def _release(self, name: str, amount: int) -> None:
        self._reserved[name] -= amount
        if not self._reserved[name]:
            del self._reserved[name]

    def _limit(self, exchange: LimitedRequest, unit: str) -> int | None:
        owner, options = exchange.owner, self._options
        if owner.admin or not owner.name:
            return None
        if unit == REQUESTS:
            return owner.requests_per_minute or options.requests_per_minute
        return owner.tokens_per_minute or options.tokens_per_minute

    def _minute(self) -> MinuteCounts:
        if self._counts is None:
            # Imported on demand: it takes 0.1 s, and most routers have no limits.
            from .minute_counts import MinuteCounts

            options = self._options
            self._counts = MinuteCounts(options.limits_storage)
            if options.router_workers > 1 and options.limits_storage is None:
                log.warning(
                    "each of the %d routers enforces the limits of keys on its own; set "
                    "--limits-storage to enforce them over all routers",
                    options.router_workers,
                )
        return self._counts

    def _refusal(self, exchange: LimitedRequest, unit: str, level: Level, amount: int) -> ApiError:
        name, limit = exchange.owner.name, level.limit
        self._show(exchange, unit, level)
        self._usage.limited(name, unit)
        seconds = max(1, math.ceil(level.wait))
        return ApiError(
            429,
            f"Rate limit reached for key '{name}' on {unit} per min ({SHORT[unit]}): "
            f"Limit {limit}, Used {limit - level.remaining}, Requested {amount}. Please try again "
            f"in {seconds}s.",
            kind=unit,
            code="rate_limit_exceeded",
            headers=((b"retry-after", str(seconds).encode()),),
        )

    def _too_long(self, exchange: LimitedRequest, prompt: int, limit: int) -> ApiError:
        self._usage.limited(exchange.owner.name, TOKENS)
        return ApiError(
            429,
            f"Request too large for key '{exchange.owner.name}' on tokens per min (TPM): Limit "
            f"{limit}, Requested {prompt}. The prompt must be shorter.",
            kind=TOKENS,
            code="rate_limit_exceeded",
        )

    def _show(self, exchange: LimitedRequest, unit: str, level: Level) -> None:
        """Add the rate limit headers to the response."""
        for name, value in (
            ("limit", str(level.limit)),
            ("remaining", str(level.remaining)),
            ("reset", duration(level.reset)),
        ):
            exchange.headers.append((f"x-ratelimit-{name}-{unit}".encode(), value.encode()))


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: ``850ms``, ``7.66s``, ``1m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{round(rest, 2):g}s"
