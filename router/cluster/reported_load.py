"""Limits on the load that a node reports, so that no value can break placement."""

from __future__ import annotations

from math import isfinite

from ...proto import tandem_pb2 as pb

# Sums of several nodes' counts must fit into a 32-bit field of a message.
MAX_COUNT = 1 << 31
MAX_TOKENS_PER_SECOND = 1e9
# Links of a decode node; more are dropped, the oldest first.
MAX_LINKS = 4096
_COUNTS = (
    "running",
    "waiting",
    "free_blocks",
    "total_blocks",
    "queued_prefill_tokens",
    "block_size",
)


def clamp_load(load: pb.Load) -> None:
    """Clamp counts, and set invalid rates to 0, which stands for "not measured"."""
    for name in _COUNTS:
        if getattr(load, name) > MAX_COUNT:
            setattr(load, name, MAX_COUNT)
    load.prefill_tokens_per_second = _rate(load.prefill_tokens_per_second)
    del load.link_rates[MAX_LINKS:]
    for link in load.link_rates:
        link.tokens_per_second = _rate(link.tokens_per_second)


def _rate(value: float) -> float:
    return min(value, MAX_TOKENS_PER_SECOND) if isfinite(value) and value > 0 else 0.0
