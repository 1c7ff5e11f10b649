"""Why an attempt at a transfer ended badly: the words that metrics and traces may use."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """A closed set, so that it can label a metric. Whoever raises or reports a failure picks one;
    the sentence for people stands beside it."""

    TIMEOUT_GREET = "timeout_greet"  # the ranks did not reach each other
    TIMEOUT_OPEN = "timeout_open"  # the prefill node did not answer
    TIMEOUT_PROGRESS = "timeout_progress"  # nothing moved
    TIMEOUT_TRANSFER = "timeout_transfer"  # the request's own time was over
    LEASE = "lease"  # not renewed in time
    PEER_LOST = "peer_lost"  # process or connection is gone
    DIED = "died"  # the other process ended while it computed this prompt
    PEER_FAILED = "peer_failed"  # the other side gave it up
    ABSENT = "absent"  # it cost a request seconds lately, and is not asked for a while
    REFUSED = "refused"  # the two must not hand over, or the peer will not take this request
    BUSY = "busy"  # no room there now
    NO_PLACE = "no_place"  # as many peers as --max-peers allows are connected there
    CANARY = "canary"  # the peer's canary is not through, or differs
    CHECKSUM = "checksum"
    FRAME = "frame"  # what came was wrong in itself
    INCOMPLETE = "incomplete"  # the two sides count differently
    COMPUTE = "compute"  # the prompt could not be computed
    NO_BLOCKS = "no_blocks"
    SUPERSEDED = "superseded"  # a newer attempt took its place
    STOPPING = "stopping"  # this process is ending
    CANCELLED = "cancelled"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        """Another version's word must not become a label here."""
        return cls.OTHER
