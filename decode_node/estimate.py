"""The choice between local and remote prefill: a pure function of measurements, tested as a table.

Local prefill makes the request wait, and every stream of this node for each of its chunks. Remote
prefill costs the round trips of a transfer, the queue there, and the slower of computing and
moving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..shared.telemetry.prefill_origin import LocalReason

# Threshold until this node's rate is measured: for less, a round trip costs more than it saves. A
# longer prompt is then read here only if the link is too slow even beside the bound.
DEFAULT_TOKENS = 64
# Opening, the first bytes, the confirmation of the last, and the step that waits for it.
ROUND_TRIPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEstimate:
    """This node's speed and load. ``tokens_per_second`` is 0 until it has read a longer prompt, and
    ``at_least`` a lower bound, which short ones show."""

    tokens_per_second: float
    at_least: float = 0.0
    queued_tokens: int = 0
    running: int = 0

    @property
    def rate(self) -> float:
        """What is known of the speed; 0 if nothing is."""
        return self.tokens_per_second or self.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEstimate:
    """A prefill node's speed and load; unknown rates are 0.

    ``round_trip`` is in seconds; ``link_tokens_per_second`` counts tokens whose KV is transferred.
    """

    tokens_per_second: float = 0.0
    queued_tokens: int = 0
    round_trip: float = 0.0
    link_tokens_per_second: float = 0.0


def why_local(
    here: LocalEstimate,
    there: RemoteEstimate,
    *,
    prompt: int,
    missing: int,
    threshold: int | None = None,
    seconds: float = math.inf,
) -> str:
    """The reason to compute ``missing`` of ``prompt`` tokens here; empty if remote is better.

    ``threshold`` is set by the operator and replaces the comparison of both sides. ``seconds`` are
    left to the request: a remote prefill that would take longer is not begun.
    """
    if not missing:
        return LocalReason.NOTHING_MISSING
    least = threshold
    if threshold is None and here.tokens_per_second <= 0:
        least = DEFAULT_TOKENS
    if least is not None and missing < least:
        return LocalReason.SHORT
    seconds_there = _seconds_there(here, there, prompt, missing)
    if threshold is None and here.rate and _seconds_here(here, missing) <= seconds_there:
        return LocalReason.FASTER_HERE
    return LocalReason.TOO_LATE_THERE if seconds_there > seconds else ""


def _seconds_here(here: LocalEstimate, missing: int) -> float:
    own = (here.queued_tokens + missing) / here.rate
    # At least one: a stream that arrives during the prefill waits for it too.
    others = max(1, here.running) * missing / here.rate
    return own + others


def _seconds_there(here: LocalEstimate, there: RemoteEstimate, prompt: int, missing: int) -> float:
    rate = there.tokens_per_second or here.tokens_per_second
    queued = there.queued_tokens / rate if rate else 0.0
    # Whether the node there has the prefix that is cached here is unknown.
    computing = prompt / rate if rate else 0.0
    moving = missing / there.link_tokens_per_second if there.link_tokens_per_second else 0.0
    return ROUND_TRIPS * there.round_trip + queued + max(computing, moving)
