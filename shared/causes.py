"""Causes of failed attempts at transfers, for metrics and traces."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """A closed set, because it labels metrics. The code that raises a failure picks its cause and
    its message."""

    TIMEOUT_GREET = "timeout_greet"  # the ranks did not reach each other
    TIMEOUT_OPEN = "timeout_open"  # the prefill node did not reply
    TIMEOUT_PROGRESS = "timeout_progress"  # no progress
    TIMEOUT_TRANSFER = "timeout_transfer"  # the request's deadline passed
    LEASE = "lease"  # not renewed in time
    PEER_LOST = "peer_lost"  # its process or connection ended
    DIED = "died"  # the peer's process ended while it computed this prompt
    PEER_FAILED = "peer_failed"  # the peer gave up
    ABSENT = "absent"  # backed off after it delayed a request by seconds
    REFUSED = "refused"  # incompatible, or the peer rejects this request
    BUSY = "busy"  # the peer has no room now
    NO_PLACE = "no_place"  # the peer has --max-peers connections
    CANARY = "canary"  # the peer's canary has not passed
    CHECKSUM = "checksum"
    FRAME = "frame"  # malformed
    INCOMPLETE = "incomplete"  # byte counts differ
    COMPUTE = "compute"  # the prompt could not be computed
    NO_BLOCKS = "no_blocks"
    SUPERSEDED = "superseded"  # replaced by a newer attempt
    STOPPING = "stopping"  # this process is shutting down
    CANCELLED = "cancelled"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        """Map causes of other versions to ``OTHER``, so that labels stay a closed set."""
        return cls.OTHER
