"""Attributes and events of a request's span while its tokens arrive."""

from __future__ import annotations

from types import TracebackType

from ..proto import tandem_pb2 as pb
from ..shared.telemetry.tracing import NO_SPAN, current
from .transfers import PrefillSource


class RequestSpan:
    """The part of a request's span after its prefill is chosen, up to the last token."""

    def __init__(self, source: PrefillSource) -> None:
        self._request = current()
        self._local = NO_SPAN
        if not source.node:
            self._local = self._request.child("local prefill", reason=source.reason)
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

    def prompt_computed(self, durations: pb.FirstToken) -> None:
        """The first token is sampled; ``durations`` breaks down the time until then."""
        self._local.end()
        self._request.set(**{f.name: value for f, value in durations.ListFields()})

    def output(self, tokens: int) -> None:
        if not self._tokens:
            self._request.event("first token")
        self._tokens += tokens
