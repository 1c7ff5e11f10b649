"""Moving windows of a minute, as a storage of the library ``limits``, whose strategy uses them.

The library's storage in memory keeps an entry for each token and starts a thread for each hit. This
one keeps sums of half seconds, and can give back what a request reserved and did not use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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

    def when_below(self, most: int, now: float) -> float:
        """The time at which the sum is at most ``most``, if nothing is added."""
        left, at = self.sum, now
        for step in self.halves:
            if left <= most:
                break
            left, at = left - step.sum, step.ends
        return at


class WindowStorage(Storage, MovingWindowSupport):
    """Windows by name, of which at most ``most`` are kept; the idle ones go first."""

    STORAGE_SCHEME = None

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self._most = most
        self._clock = clock
        self._windows: dict[str, Window] = {}

    def window(self, key: str) -> Window:
        """The window of this name, up to date; the one used last is at the end."""
        window = self._windows.pop(key, None) or Window()
        while len(self._windows) >= self._most:
            del self._windows[next(iter(self._windows))]
        self._windows[key] = window
        window.slide(self._clock())
        return window

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        window = self.window(key)
        if window.sum + amount > limit:
            return False
        window.add(self._clock(), amount)
        return True

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        window = self.window(key)
        return window.halves[0].begun if window.halves else self._clock(), window.sum

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        window = self.window(key)
        window.add(self._clock(), amount)
        return window.sum

    def get(self, key: str) -> int:
        return self.window(key).sum

    def get_expiry(self, key: str) -> float:
        return self.window(key).when_below(0, self._clock())

    def check(self) -> bool:
        return True

    def reset(self) -> int:
        count = len(self._windows)
        self._windows.clear()
        return count

    def clear(self, key: str) -> None:
        self._windows.pop(key, None)

    @property
    def base_exceptions(self) -> type[Exception]:
        return KeyError


@dataclass(slots=True)
class Reservation:
    """An amount that a window counts already."""

    window: Window
    step: HalfSecond
    amount: int

    def settle(self, used: int, now: float) -> None:
        """Count what was used instead; more than was reserved counts from now on."""
        self.window.slide(now)
        if used > self.amount:
            self.window.add(now, used - self.amount)
        elif self.step.ends > now:
            self.step.sum -= self.amount - used
            self.window.sum -= self.amount - used


@dataclass(frozen=True, slots=True)
class Level:
    """The state of one limit. Times are seconds from now: until all of it is free again, and until
    an amount that was refused fits."""

    limit: int
    remaining: int
    reset: float
    wait: float


class MinuteLimits:
    """Limits by name, of at most ``most`` names."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._storage = WindowStorage(most, clock)
        self._limiter = MovingWindowRateLimiter(self._storage)

    def take(self, name: str, limit: int, amount: int) -> Reservation | None:
        """Count an amount; ``None`` if it is over the limit."""
        item = RateLimitItemPerMinute(limit)
        if not self._limiter.hit(item, name, cost=amount):
            return None
        window = self._storage.window(item.key_for(name))
        return Reservation(window, window.halves[-1], amount)

    def settle(self, reservation: Reservation, used: int) -> None:
        reservation.settle(used, self._clock())

    def level(self, name: str, limit: int, amount: int = 0) -> Level:
        """The state of a limit; ``amount`` is what is to fit."""
        window, now = (
            self._storage.window(RateLimitItemPerMinute(limit).key_for(name)),
            self._clock(),
        )
        return Level(
            limit=limit,
            remaining=max(0, limit - window.sum),
            reset=window.when_below(0, now) - now,
            wait=window.when_below(limit - amount, now) - now,
        )
