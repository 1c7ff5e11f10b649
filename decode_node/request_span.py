"""What a request's span learns while its tokens come."""

from __future__ import annotations

from types import TracebackType

from ..proto import tandem_pb2 as pb
from ..shared.telemetry.tracing import NO_SPAN, current
from .transfers import Outcome


class RequestSpan:
    """From the prompt's KV, wherever it came from, to the last token."""

    def __init__(self, outcome: Outcome) -> None:
        self._request = current()
        self._local = NO_SPAN
        if not outcome.node:
            self._local = self._request.child("local prefill", reason=outcome.reason)
        self._tokens = 0

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._local.end("the request ended before")
        self._request.set(generated_tokens=self._tokens)

    def prompt_computed(self, spent: pb.FirstToken) -> None:
        """The first token is there, after phases of these lengths."""
        self._local.end()
        self._request.set(**{f.name: value for f, value in spent.ListFields()})

    def output(self, tokens: int) -> None:
        if not self._tokens:
            self._request.event("first token")
        self._tokens += tokens
