"""Where to prefill a prompt: a pure function of what was measured, so that it is tested as a table.

Prefilling here costs the request its own wait, and besides makes every stream of this node wait for
each of its chunks. Prefilling there costs the round trips of a transfer, the queue there, and the
slower of computing and moving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..shared.telemetry.prefill_origin import LocalReason

# Until this node's own rate is measured: below this, a round trip costs more than it saves.
DEFAULT_TOKENS = 64
# Opening, the first bytes, the last one's confirmation, and the step that waits for it.
ROUND_TRIPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEstimate:
    """This node. ``tokens_per_second`` is 0 until measured; ``running`` sequences are decoding."""

    tokens_per_second: float
    queued_tokens: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEstimate:
    """A prefill node, as far as it is known: 0 stands for a rate that is not.

    ``round_trip`` is in seconds; ``link_tokens_per_second`` counts tokens' KV.
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
    """Why ``missing`` of ``prompt`` tokens are better computed here; empty when they are not.

    ``threshold`` is the operator's word: with it the two sides are not compared. ``seconds`` are
    those that the request has left: what would take longer there is not begun.
    """
    if not missing:
        return LocalReason.NOTHING_MISSING
    if threshold is None and here.tokens_per_second <= 0:
        threshold = DEFAULT_TOKENS
    if threshold is not None and missing < threshold:
        return LocalReason.SHORT
    if not (here.tokens_per_second or there.tokens_per_second):
        return ""  # nothing is measured
    seconds_there = _seconds_there(here, there, prompt, missing)
    if threshold is None and _seconds_here(here, missing) <= seconds_there:
        return LocalReason.FASTER_HERE
    return LocalReason.TOO_LATE_THERE if seconds_there > seconds else ""


def _seconds_here(here: LocalEstimate, missing: int) -> float:
    own = (here.queued_tokens + missing) / here.tokens_per_second
    # One at least: a stream that comes while this computes waits for it too.
    others = max(1, here.running) * missing / here.tokens_per_second
    return own + others


def _seconds_there(here: LocalEstimate, there: RemoteEstimate, prompt: int, missing: int) -> float:
    rate = there.tokens_per_second or here.tokens_per_second
    # Nobody knows whether the node there still has the prefix that is cached here.
    computing = prompt / rate
    moving = missing / there.link_tokens_per_second if there.link_tokens_per_second else 0.0
    return ROUND_TRIPS * there.round_trip + there.queued_tokens / rate + max(computing, moving)
