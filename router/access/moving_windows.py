"""Moving windows of a minute, as a storage of the library ``limits``, whose strategy uses them.

The library's storage in memory keeps an entry for each token and starts a thread for each hit. This
one keeps sums of half seconds, and can give back what a request reserved and did not use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from limits import RateLimitItemPerMinute
from limits.storage import MovingWindowSupport, Storage
from limits.strategies import MovingWindowRateLimiter

STEP_SECONDS = 0.5
MINUTE = 60.0


@dataclass(slots=True)
class HalfSecond:
    """The sum of the half second from ``begun``; it counts until ``ends``."""

    begun: float
    sum: int = 0

    @property
    def ends(self) -> float:
        return self.begun + STEP_SECONDS + MINUTE


@dataclass(slots=True)
class Window:
    """The halves of the last minute, oldest first, and their sum."""

    halves: deque[HalfSecond] = field(default_factory=deque)
    sum: int = 0

    def slide(self, now: float) -> None:
        """Drop the halves that ended a minute ago."""
        while self.halves and self.halves[0].ends <= now:
            self.sum -= self.halves.popleft().sum

    def add(self, now: float, amount: int) -> HalfSecond:
        """Add to the present step, and return it."""
        begun = now - now % STEP_SECONDS
        if not self.halves or self.halves[-1].begun < begun:
            self.halves.append(HalfSecond(begun))
        self.sum += amount
        self.halves[-1].sum += amount
        return self.halves[-1]

    def give_back(self, begun: float, amount: int) -> None:
        """Subtract from the half second that began then, unless it counts no longer."""
        for half in self.halves:
            if half.begun == begun:
                half.sum -= amount
                self.sum -= amount

    def when_below(self, most: int, now: float) -> float:
        """The time at which the sum is at most ``most``, if nothing is added."""
        left, at = self.sum, now
        for step in self.halves:
            if left <= most:
                break
            left, at = left - step.sum, step.ends
        return at


class Windows(Protocol):
    """Windows by name."""

    def opened(self, key: str) -> AbstractContextManager[Window]:
        """The window of this name, up to date; no other process changes it meanwhile."""

    def clear(self, key: str) -> None: ...

    def reset(self) -> int: ...


class OwnWindows:
    """The windows of one process, of which at most ``most`` are kept; the idle ones go first."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._windows: dict[str, Window] = {}

    @contextmanager
    def opened(self, key: str) -> Iterator[Window]:
        window = self._windows.pop(key, None) or Window()
        while len(self._windows) >= self._most:
            del self._windows[next(iter(self._windows))]
        self._windows[key] = window
        window.slide(self._clock())
        yield window

    def clear(self, key: str) -> None:
        self._windows.pop(key, None)

    def reset(self) -> int:
        count = len(self._windows)
        self._windows.clear()
        return count


class WindowStorage(Storage, MovingWindowSupport):
    """The library's view of the windows."""

    STORAGE_SCHEME = None

    def __init__(self, windows: Windows, clock: Callable[[], float]) -> None:
        super().__init__()
        self._windows = windows
        self._clock = clock

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        with self._windows.opened(key) as window:
            if window.sum + amount > limit:
                return False
            window.add(self._clock(), amount)
            return True

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        with self._windows.opened(key) as window:
            return window.halves[0].begun if window.halves else self._clock(), window.sum

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        with self._windows.opened(key) as window:
            window.add(self._clock(), amount)
            return window.sum

    def get(self, key: str) -> int:
        with self._windows.opened(key) as window:
            return window.sum

    def get_expiry(self, key: str) -> float:
        with self._windows.opened(key) as window:
            return window.when_below(0, self._clock())

    def reset(self) -> int:
        return self._windows.reset()

    def clear(self, key: str) -> None:
        self._windows.clear(key)

    def check(self) -> bool:
        return True

    @property
    def base_exceptions(self) -> type[Exception]:
        return KeyError


@dataclass(frozen=True, slots=True)
class Reservation:
    """An amount that the window ``key`` counts already, in the half second from ``begun``."""

    key: str
    begun: float
    amount: int


@dataclass(frozen=True, slots=True)
class Level:
    """The state of one limit. Times are seconds from now: until all of it is free again, and until
    an amount that was rejected fits."""

    limit: int
    remaining: int
    reset: float
    wait: float


class MinuteLimits:
    """Limits by name, of at most ``most`` names unless there are ``windows`` for them."""

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        windows: Windows | None = None,
    ) -> None:
        self._clock = clock
        self._windows = windows or OwnWindows(most, clock)
        self._limiter = MovingWindowRateLimiter(WindowStorage(self._windows, clock))

    def take(self, name: str, limit: int, amount: int) -> Reservation | None:
        """Count an amount; ``None`` if it is over the limit."""
        item = RateLimitItemPerMinute(limit)
        if not self._limiter.hit(item, name, cost=amount):
            return None
        key = item.key_for(name)
        with self._windows.opened(key) as window:
            return Reservation(key, window.halves[-1].begun, amount)

    def settle(self, reservation: Reservation, used: int) -> None:
        """Count what was used instead; more than was reserved counts from now on."""
        with self._windows.opened(reservation.key) as window:
            if used > reservation.amount:
                window.add(self._clock(), used - reservation.amount)
            else:
                window.give_back(reservation.begun, reservation.amount - used)

    def level(self, name: str, limit: int, amount: int = 0) -> Level:
        """The state of a limit; ``amount`` is what is to fit."""
        now = self._clock()
        with self._windows.opened(RateLimitItemPerMinute(limit).key_for(name)) as window:
            return Level(
                limit=limit,
                remaining=max(0, limit - window.sum),
                reset=window.when_below(0, now) - now,
                wait=window.when_below(limit - amount, now) - now,
            )
