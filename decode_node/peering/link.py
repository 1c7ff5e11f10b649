"""Measurements of the link to one prefill node."""

from __future__ import annotations

import math

from ...proto import tandem_pb2 as pb

# Seconds, until one is measured.
DEFAULT_ROUND_TRIP = 0.005
# The duration of a smaller transfer says more about latency than about bandwidth.
MIN_BYTES = 1 << 20
# If a larger share of the time passes after the last chunk is computed, the link is the bottleneck.
LINK_BOUND = 0.2
# Weight of the newest rate in the moving average.
NEWEST = 0.3


class MeasuredLink:
    """Round trip and rate, measured by past RPCs and transfers, canaries included."""

    def __init__(self) -> None:
        self.round_trip = DEFAULT_ROUND_TRIP
        self.tokens_per_second = 0.0  # 0 until known
        self._measured = False

    def add_round_trip(self, seconds: float) -> None:
        """Note the duration of an RPC. The shortest counts: others met a busy process."""
        self.round_trip = min(self.round_trip, seconds) if self._measured else seconds
        self._measured = True

    def add_transfer(self, tokens: int, done: pb.OpenDone) -> None:
        """Note that the KV of ``tokens`` tokens has arrived in the time that the peer reports."""
        seconds = done.compute_seconds + done.exposed_seconds
        if done.bytes < MIN_BYTES or not 0 < seconds < math.inf:
            return
        rate, average = tokens / seconds, self.tokens_per_second
        if done.exposed_seconds <= LINK_BOUND * seconds:
            # Computing was slower, so the rate is only a lower bound of the link's.
            self.tokens_per_second = max(average, rate)
        else:
            self.tokens_per_second = NEWEST * rate + (1 - NEWEST) * average if average else rate
