"""Metrics of attempts at transfers, on the receiving and the sending node, without canaries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..causes import Cause
from ..errors import OverloadedError, PeerRefusedError, TransferError
from ..handoff.inbox import NONE
from ..telemetry.tracing import current

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# The third and later attempts share a label.
MAX_NUMBER = 3

FAILED, REFUSED, CANCELLED = "failed", "refused", "cancelled"


@dataclass(slots=True)
class AttemptRecord:
    """A running attempt. It counts as failed unless ``succeeded`` is called."""

    number: int  # from 0
    outcome: str = FAILED
    cause: str = Cause.OTHER.value
    carrier: str = NONE
    bytes: int = 0
    exposed_seconds: float | None = None
    start: float = field(default_factory=time.monotonic)

    def succeeded(self, outcome: str, count: int, exposed_seconds: float | None) -> None:
        """Record success. ``exposed_seconds`` is ``None`` if the sender did not report it."""
        self.outcome, self.cause = outcome, ""
        self.bytes, self.exposed_seconds = count, exposed_seconds

    def failed(self, error: BaseException, cause: Cause | None = None) -> None:
        """Record failure, unless the attempt has succeeded: a peer may close the connection right
        after its last message. ``cause`` overrides the error's own."""
        if not self.cause:
            return
        self.outcome, own_cause = _outcome_of(error)
        self.cause = (cause or own_cause).value


def _outcome_of(error: BaseException) -> tuple[str, Cause]:
    match error:
        case PeerRefusedError():
            return REFUSED, error.cause
        case TransferError():
            return FAILED, error.cause
        case OverloadedError():
            return REFUSED, Cause.BUSY
        case asyncio.CancelledError() | GeneratorExit():
            return CANCELLED, Cause.CANCELLED
    return FAILED, Cause.OTHER


class TransferMetrics:
    """Series of attempts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("carrier", "attempt")
        self._attempts = Counter(
            "tandem_transfers",
            "Attempts at transfers by outcome, failed ones with their cause.",
            ("outcome", "cause", *labels),
            registry=registry,
        )
        self._bytes = Counter(
            "tandem_transfer_bytes", "KV bytes moved by attempts.", labels, registry=registry
        )
        self._seconds = Histogram(
            "tandem_transfer_seconds",
            "Duration of attempts.",
            ("outcome", *labels),
            registry=registry,
            buckets=SECONDS,
        )
        self._exposed = Histogram(
            "tandem_transfer_exposed_seconds",
            "Time from the last computed layer to the last confirmed byte.",
            labels,
            registry=registry,
            buckets=SECONDS,
        )

    @contextmanager
    def attempt(self, number: int) -> Iterator[AttemptRecord]:
        """Record one attempt; an exception determines its outcome."""
        record = AttemptRecord(number)
        try:
            yield record
        except BaseException as error:
            record.failed(error)
            raise
        finally:
            self.count(record)

    def count(self, record: AttemptRecord) -> None:
        """Count a finished attempt, and set the same attributes on its span."""
        current().set(
            outcome=record.outcome,
            cause=record.cause,
            carrier=record.carrier,
            bytes=record.bytes,
        )
        number = record.number + 1
        labels = record.carrier, str(number) if number < MAX_NUMBER else f"{MAX_NUMBER}+"
        self._attempts.labels(record.outcome, record.cause, *labels).inc()
        self._seconds.labels(record.outcome, *labels).observe(time.monotonic() - record.start)
        if record.bytes:
            self._bytes.labels(*labels).inc(record.bytes)
        if record.exposed_seconds is not None:
            self._exposed.labels(*labels).observe(record.exposed_seconds)
