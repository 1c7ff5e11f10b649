"""The three spans of one attempt on the sending side. They overlap, as the work does."""

from __future__ import annotations

from ..shared.telemetry.tracing import NO_SPAN, current


class TransferSpans:
    """Begun by the task that serves the attempt; the engine's loop then says how far it is."""

    def __init__(self) -> None:
        self._attempt = current()
        self._queue = self._compute = self._stream = NO_SPAN

    def queued(self, tokens_ahead: int) -> None:
        self._queue = self._attempt.child("queue", tokens_ahead=tokens_ahead)

    def started(self, cached_tokens: int) -> None:
        """Blocks are there: from now on what is computed is also sent."""
        self._queue.end()
        self._compute = self._attempt.child("compute", cached_tokens=cached_tokens)
        self._stream = self._attempt.child("stream")

    def computed(self) -> None:
        self._compute.end()

    def confirmed(self, count: int, exposed_seconds: float) -> None:
        """Every rank's bytes have arrived."""
        self._stream.set(bytes=count, exposed_seconds=exposed_seconds)
        self._stream.end()

    def over(self) -> None:
        """What has not come to its end by now does not."""
        for span in (self._queue, self._compute, self._stream):
            span.end("the attempt ended before")
