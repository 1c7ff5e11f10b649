"""Measurements of the link to one prefill node."""

from __future__ import annotations

import math

from ...proto import tandem_pb2 as pb

# Before anything is measured.
DEFAULT_ROUND_TRIP = 0.005
# The time of a smaller transfer says more about latency than about bandwidth.
MIN_BYTES = 1 << 20
# If a larger share of the time comes after the last chunk, the link was the bottleneck.
LINK_BOUND = 0.2
NEWEST = 0.3


class MeasuredLink:
    """Round trip and rate, measured by past RPCs and transfers, canaries included."""

    def __init__(self) -> None:
        self.round_trip = DEFAULT_ROUND_TRIP
        self.tokens_per_second = 0.0  # 0 until known
        self._answered = False

    def answered(self, seconds: float) -> None:
        """An RPC took this long. The shortest counts: others met a busy process."""
        self.round_trip = min(self.round_trip, seconds) if self._answered else seconds
        self._answered = True

    def moved(self, tokens: int, done: pb.OpenDone) -> None:
        """The KV of ``tokens`` tokens has arrived, in the time that the peer reports."""
        seconds = done.compute_seconds + done.exposed_seconds
        if done.bytes < MIN_BYTES or not 0 < seconds < math.inf:
            return
        rate, known = tokens / seconds, self.tokens_per_second
        if done.exposed_seconds <= LINK_BOUND * seconds:
            # Computing was slower, so this is only a lower bound of the link's rate.
            self.tokens_per_second = max(known, rate)
        else:
            self.tokens_per_second = NEWEST * rate + (1 - NEWEST) * known if known else rate
