"""The counts of each key at all workers, also at those that have ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import fields
from typing import Any

from ..access.key_usage import KeyCounts
from .process_link import Topic

# What a worker has counted since it was asked last is lost with it.
ASK_SECONDS = 5.0

# By the names of keys, each count by its name.
Described = dict[str, dict[str, Any]]


class MergedUsage:
    """Adds up what ``gather`` tells of each worker, by its number."""

    def __init__(self, gather: Callable[[Topic], Awaitable[dict[int, bytes]]]) -> None:
        self._gather = gather
        self._told: dict[int, Described] = {}
        self._ended: Described = {}

    async def run(self) -> None:
        """Ask every few seconds, because workers end without notice."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            await self._ask()

    async def get(self) -> bytes:
        """The counts of now."""
        await self._ask()
        return describe_usage(merged_usage((self._ended, *self._told.values())))

    def worker_ended(self, number: int) -> None:
        """Keep what a worker has counted."""
        told = self._told.pop(number, {})
        self._ended = _described(merged_usage((self._ended, told)))

    async def _ask(self) -> None:
        told = await self._gather(Topic.USAGE)
        self._told |= {number: json.loads(one) for number, one in told.items()}


def describe_usage(usage: dict[str, KeyCounts]) -> bytes:
    """The counts of one process, for another."""
    return json.dumps(_described(usage)).encode()


def read_usage(told: bytes) -> dict[str, KeyCounts]:
    """What ``describe_usage`` wrote."""
    return merged_usage([json.loads(told)])


def merged_usage(workers: Iterable[Described]) -> dict[str, KeyCounts]:
    """The sums of the counts of several workers."""
    merged: dict[str, KeyCounts] = {}
    for worker in workers:
        for name, counts in worker.items():
            total = merged.setdefault(name, KeyCounts())
            for field, count in counts.items():
                if field == "limited":
                    total.limited.update(count)
                else:
                    setattr(total, field, getattr(total, field) + count)
    return merged


def _described(usage: dict[str, KeyCounts]) -> Described:
    return {
        name: {field.name: getattr(counts, field.name) for field in fields(counts)}
        for name, counts in usage.items()
    }
