"""Spans of one attempt on the sending side: queue, then compute and stream, which overlap."""

from __future__ import annotations

from ..shared.telemetry.tracing import NO_SPAN, current


class TransferSpans:
    """Created by the task that serves the attempt; the engine's loop reports its progress."""

    def __init__(self) -> None:
        self._attempt = current()
        self._queue = self._compute = self._stream = NO_SPAN

    def queued(self, tokens_ahead: int) -> None:
        self._queue = self._attempt.child("queue", tokens_ahead=tokens_ahead)

    def started(self, cached_tokens: int) -> None:
        """The sequence has its blocks; from now on each computed layer is sent."""
        self._queue.end()
        self._compute = self._attempt.child("compute", cached_tokens=cached_tokens)
        self._stream = self._attempt.child("stream")

    def computed(self) -> None:
        self._compute.end()

    def confirmed(self, count: int, exposed_seconds: float) -> None:
        """Every rank's bytes have arrived."""
        self._stream.set(bytes=count, exposed_seconds=exposed_seconds)
        self._stream.end()

    def close(self) -> None:
        """End the spans that are still open."""
        for span in (self._queue, self._compute, self._stream):
            span.end("the attempt ended before")
