"""The periodic log line about throughput, logged while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Cumulative token counts of a process, and its current load."""

    prompt_tokens: float
    generated_tokens: float
    cache_queries: float  # prompt tokens looked up in the prefix index
    cache_hits: float
    running: int
    waiting: int
    transfers: int
    kv_usage: float  # 0 to 1

    @property
    def under_way(self) -> bool:
        return bool(self.running or self.waiting or self.transfers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Throughput between two readings; percentages are 0 to 100."""

    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    running: int
    waiting: int
    transfers: int
    kv_usage_percent: float
    prefix_hit_percent: float | None  # None without lookups

    def __str__(self) -> str:
        hits = self.prefix_hit_percent
        parts = (
            f"prompt {self.prompt_tokens_per_second:.1f} tokens/s",
            f"generation {self.generated_tokens_per_second:.1f} tokens/s",
            f"running {self.running}",
            f"waiting {self.waiting}",
            f"KV usage {self.kv_usage_percent:.1f}%",
            *(() if hits is None else (f"prefix hits {hits:.1f}%",)),
            f"transfers {self.transfers}",
        )
        return ", ".join(parts)


def rates(before: Work, now: Work, seconds: float) -> Rates | None:
    """The rates between two readings; ``None`` if the process was idle."""
    prompt = now.prompt_tokens - before.prompt_tokens
    generated = now.generated_tokens - before.generated_tokens
    if not (prompt or generated or now.under_way):
        return None
    queries = now.cache_queries - before.cache_queries
    hits = now.cache_hits - before.cache_hits
    return Rates(
        prompt_tokens_per_second=round(prompt / seconds, 1),
        generated_tokens_per_second=round(generated / seconds, 1),
        running=now.running,
        waiting=now.waiting,
        transfers=now.transfers,
        kv_usage_percent=round(100 * now.kv_usage, 1),
        prefix_hit_percent=round(100 * hits / queries, 1) if queries > 0 else None,
    )


async def log_rates(interval: float, read: Callable[[], Work], log: logging.Logger) -> None:
    """Log every ``interval`` seconds until cancelled; never if it is 0."""
    if not interval:
        await asyncio.Event().wait()
    before, since = read(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        work, now = read(), time.monotonic()
        if (throughput := rates(before, work, now - since)) is not None:
            log.info("%s", throughput, extra={"fields": asdict(throughput)})
        before, since = work, now
