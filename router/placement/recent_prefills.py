"""The prompts that prefill nodes compute or have lately computed, for the cluster page, which shows
KV in transit.

A placement names the prefill node that the decode node tries first; the node's own report
(``Usage``) says which one computed the prompt, if any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from ...proto import tandem_pb2 as pb

# Pages poll once or twice a second.
MAX_RECENT = 64
RECENT_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class Prefill:
    """One prompt from its placement until its KV is complete. ``moved_tokens`` came from
    ``prefill_node``, which is empty while the prompt is computed where it is decoded. ``start`` and
    ``end`` are times of the clock."""

    number: int
    prefill_node: str
    decode_node: str
    tokens: int
    start: float
    end: float | None = None
    moved_tokens: int = 0
    first_token: pb.FirstToken | None = None
    failed: bool = False


class RecentPrefills:
    """The prompts of this router. Each begins once and ends once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = count(1)
        self._running: dict[int, Prefill] = {}
        self._recent: deque[Prefill] = deque(maxlen=MAX_RECENT)
        self.prompts_moved = 0
        self.prompts_local = 0
        self.tokens_moved = 0

    def now(self) -> float:
        """The time by the clock of all prefills."""
        return self._clock()

    def begin(self, prefill_node: str, decode_node: str, tokens: int) -> Prefill:
        prefill = Prefill(next(self._numbers), prefill_node, decode_node, tokens, self._clock())
        self._running[prefill.number] = prefill
        return prefill

    def finish(self, prefill: Prefill, usage: pb.Usage) -> None:
        """Record that the KV of a prompt is complete, as its decode node reports."""
        if self._running.pop(prefill.number, None) is None:
            return
        prefill.end = self._clock()
        prefill.prefill_node = usage.prefill_node
        prefill.moved_tokens = usage.remote_tokens
        prefill.first_token = usage.first_token
        if usage.prefill_node:
            self.prompts_moved += 1
            self.tokens_moved += usage.remote_tokens
            self._recent.append(prefill)
        else:
            self.prompts_local += 1

    def end(self, prefill: Prefill) -> None:
        """Stop tracking a prompt; it has failed unless it was finished."""
        if self._running.pop(prefill.number, None) is not None and prefill.prefill_node:
            prefill.end, prefill.failed = self._clock(), True
            self._recent.append(prefill)

    def running(self) -> Iterator[Prefill]:
        """Prompts that a prefill node is computing, oldest first."""
        return (prefill for prefill in self._running.values() if prefill.prefill_node)

    def recent(self) -> list[Prefill]:
        """Prompts that prefill nodes have lately computed, oldest first."""
        since = self._clock() - RECENT_SECONDS
        return [prefill for prefill in self._recent if (prefill.end or 0.0) >= since]
