"""What was measured of the way to one prefill node."""

from __future__ import annotations

import math

from ..proto import tandem_pb2 as pb

# Before anything is measured.
DEFAULT_ROUND_TRIP = 0.005
# The time of a smaller transfer says more about latency than about the link.
MIN_BYTES = 1 << 20
# With a larger part of the time after the last chunk, it was the link that took it.
LINK_BOUND = 0.2
NEWEST = 0.3


class MeasuredLink:
    """Round trip and rate, as past calls and transfers (canaries too) have shown them."""

    def __init__(self) -> None:
        self.round_trip = DEFAULT_ROUND_TRIP
        self.tokens_per_second = 0.0  # 0 until known
        self._answered = False

    def answered(self, seconds: float) -> None:
        """A call took this long. The shortest counts: the others met a busy process."""
        self.round_trip = min(self.round_trip, seconds) if self._answered else seconds
        self._answered = True

    def moved(self, tokens: int, account: pb.OpenDone) -> None:
        """The KV of ``tokens`` tokens has come, and the peer says how long it took."""
        seconds = account.compute_seconds + account.exposed_seconds
        if account.bytes < MIN_BYTES or not 0 < seconds < math.inf:
            return
        rate, known = tokens / seconds, self.tokens_per_second
        if account.exposed_seconds <= LINK_BOUND * seconds:
            # Computing was slower, so this is only what the link can do at least.
            self.tokens_per_second = max(known, rate)
        else:
            self.tokens_per_second = NEWEST * rate + (1 - NEWEST) * known if known else rate
