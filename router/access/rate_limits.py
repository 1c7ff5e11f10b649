"""Limits of a key: requests and tokens in any minute, with OpenAI's headers and errors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import ApiError
from ..http.access_log import AccessRecord
from ..http.key_owner import KeyOwner
from ..options import RouterOptions
from .api_keys import MAX_KEYS
from .key_usage import KeyUsage

if TYPE_CHECKING:
    from .moving_windows import Level, MinuteLimits
    from .shared_windows import SharedWindows

REQUESTS, TOKENS = "requests", "tokens"
SHORT = {REQUESTS: "RPM", TOKENS: "TPM"}


class LimitedRequest(Protocol):
    """A request, with the headers of its response."""

    owner: KeyOwner
    access: AccessRecord
    headers: list[tuple[bytes, bytes]]


class RateLimits:
    """The limits of all keys. Admins and clients without a key have none."""

    def __init__(self, options: RouterOptions, usage: KeyUsage, shared: Path | None = None) -> None:
        """``shared`` is a file by which several processes share their limits."""
        self._options = options
        self._shared = shared
        self._usage = usage
        self._limits: MinuteLimits | None = None
        if options.requests_per_minute or options.tokens_per_minute:
            self._minute()  # not with the first request

    def count_request(self, exchange: LimitedRequest) -> None:
        """Count a request. Raises ``ApiError`` 429 if its key has none left."""
        limit = self._limit(exchange, REQUESTS)
        if limit is not None:
            name = f"{REQUESTS}/{exchange.owner.name}"
            if self._minute().take(name, limit, 1) is None:
                raise self._refusal(exchange, REQUESTS, limit, 1)
            self._show(exchange, REQUESTS, self._minute().level(name, limit))

    @contextmanager
    def reserved(self, exchange: LimitedRequest, prompt: int, output: int) -> Iterator[None]:
        """Reserve the tokens of a prompt and of the longest output while the block runs; then only
        those count that were used. Raises ``ApiError`` 429 if the key has too few left."""
        limit = self._limit(exchange, TOKENS)
        if limit is None:
            yield
            return
        if prompt > limit:
            raise self._too_long(exchange, prompt, limit)
        # A request without ``max_tokens`` must not be rejected forever.
        amount = min(prompt + output, limit)
        name = f"{TOKENS}/{exchange.owner.name}"
        reservation = self._minute().take(name, limit, amount)
        if reservation is None:
            raise self._refusal(exchange, TOKENS, limit, amount)
        self._show(exchange, TOKENS, self._minute().level(name, limit))
        try:
            yield
        finally:
            self._minute().settle(reservation, exchange.access.tokens)

    def _limit(self, exchange: LimitedRequest, unit: str) -> int | None:
        owner, options = exchange.owner, self._options
        if owner.admin or not owner.name:
            return None
        if unit == REQUESTS:
            return owner.requests_per_minute or options.requests_per_minute
        return owner.tokens_per_minute or options.tokens_per_minute

    def _minute(self) -> MinuteLimits:
        if self._limits is None:
            # On demand: the library takes 0.1 s to import, and most routers have no limits.
            from .moving_windows import MinuteLimits

            self._limits = MinuteLimits(4 * MAX_KEYS, windows=self._windows())
        return self._limits

    def _windows(self) -> SharedWindows | None:
        if self._shared is None:
            return None
        from .shared_windows import SharedWindows  # imports the library too

        return SharedWindows(self._shared, 4 * MAX_KEYS, time.monotonic)

    def _refusal(self, exchange: LimitedRequest, unit: str, limit: int, amount: int) -> ApiError:
        name = exchange.owner.name
        level = self._minute().level(f"{unit}/{name}", limit, amount)
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
        """Set the headers of the response."""
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
