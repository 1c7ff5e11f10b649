"""The choice between local and remote prefill: a pure function of measurements, tested as a table.

Local prefill delays the request, and each of its chunks delays every stream of this node. Remote
prefill costs the round trips of a transfer, the peer's queue, and the slower of computing and
moving the KV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..shared.telemetry.prefill_origin import LocalReason

# Threshold until this node's rate is measured: below it, a round trip costs more than it saves.
# Longer prompts are then prefilled here only if the link is slower than this node's lower bound.
DEFAULT_TOKENS = 64
# Opening, first bytes, confirmation of the last ones, and the step that waits for it.
ROUND_TRIPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEstimate:
    """This node's speed and load.

    ``tokens_per_second`` is 0 until a longer prompt was prefilled; ``min_tokens_per_second`` is a
    lower bound, measured with short prompts.
    """

    tokens_per_second: float
    min_tokens_per_second: float = 0.0
    queued_tokens: int = 0
    running: int = 0

    @property
    def rate(self) -> float:
        """The measured speed, or else its lower bound; 0 if unknown."""
        return self.tokens_per_second or self.min_tokens_per_second


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

    ``threshold``, if the operator has set it, replaces the comparison of both sides. ``seconds``
    is the time until the request's deadline; a remote prefill that would exceed it is not started.
    """
    if not missing:
        return LocalReason.NOTHING_MISSING
    min_missing = threshold
    if threshold is None and here.tokens_per_second <= 0:
        min_missing = DEFAULT_TOKENS
    if min_missing is not None and missing < min_missing:
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
    # The peer may not have cached the prefix that is cached here, so it may compute all of it.
    computing = prompt / rate if rate else 0.0
    moving = missing / there.link_tokens_per_second if there.link_tokens_per_second else 0.0
    return ROUND_TRIPS * there.round_trip + queued + max(computing, moving)
