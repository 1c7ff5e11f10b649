"""Spans of a request across all parts, independent of a tracing library.

A ``Tracer`` begins root spans, a span begins its children. Without ``--otlp-endpoint`` spans are
``_Untraced``: they record nothing but still propagate a client's trace. ``otlp.py`` exports spans.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from ..errors import TransferError
from .logs import REQUEST_ID_HEADER, add_log_context, current_log_context

# The header of W3C Trace Context: version, trace, span, flags.
TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool
Metadata = tuple[tuple[str, str], ...]


class Span(Protocol):
    """A timed operation. Using it after its end is safe and records nothing."""

    @property
    def traceparent(self) -> str:
        """Identifies this span to another process; empty if there is none."""

    def child(self, name: str, **attributes: Value) -> Span:
        """Begin a child span; the caller ends it."""

    def event(self, name: str, **attributes: Value) -> None:
        """Record an event at the current time."""

    def set(self, **attributes: Value) -> None:
        """Add attributes."""

    def end(self, failure: str = "") -> None:
        """End the span. Idempotent."""


class Tracer(Protocol):
    """Begins and exports the spans of one process."""

    def begin(self, name: str, traceparent: str, **attributes: Value) -> Span:
        """Begin a child of another process's span, or a new trace if ``traceparent`` is empty."""

    def close(self) -> None:
        """Export ended spans, within a deadline."""


class _Untraced:
    """A span without a recording; its children are the span itself."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def child(self, name: str, **attributes: Value) -> Span:
        return self

    def event(self, name: str, **attributes: Value) -> None: ...

    def set(self, **attributes: Value) -> None: ...

    def end(self, failure: str = "") -> None: ...


class _NoTracer:
    def begin(self, name: str, traceparent: str, **attributes: Value) -> Span:
        return _Untraced(traceparent)

    def close(self) -> None: ...


NO_SPAN: Span = _Untraced()
NO_TRACER: Tracer = _NoTracer()

_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current() -> Span:
    """The span of the running task."""
    return _current.get()


@contextmanager
def serving(tracer: Tracer, name: str, traceparent: str, **attributes: Value) -> Iterator[Span]:
    """The span of a whole request, which must have its own task: the previous span is not restored,
    so this may enclose the ``yield`` of a streaming handler."""
    valid = _TRACEPARENT.fullmatch(traceparent) is not None
    span = tracer.begin(name, traceparent if valid else "", **attributes)
    _current.set(span)
    add_log_context(trace_id=_trace_of(span))
    with _ending(span):
        yield span


@contextmanager
def step(name: str, **attributes: Value) -> Iterator[Span]:
    """A child of the current span that becomes the current one. Not for use around the ``yield`` of
    a generator: see ``branch``."""
    span = current().child(name, **attributes)
    token = _current.set(span)
    try:
        with _ending(span):
            yield span
    finally:
        _current.reset(token)


@contextmanager
def branch(name: str, **attributes: Value) -> Iterator[Span]:
    """A child of the current span for generators: it does not become the current one."""
    span = current().child(name, **attributes)
    with _ending(span):
        yield span


def metadata(span: Span) -> Metadata:
    """gRPC metadata that carries the request id and the trace to another part."""
    items = (
        (REQUEST_ID_HEADER, current_log_context().request_id),
        (TRACEPARENT, span.traceparent),
    )
    return tuple((key, value) for key, value in items if value)


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    try:
        yield
    except GeneratorExit:
        span.end()  # the reader has finished early
        raise
    except BaseException as error:
        span.end(_failure(error))
        raise
    span.end()


def _failure(error: BaseException) -> str:
    """The description of an error in a trace. Only messages of transfers are certain not to quote
    the client's prompt."""
    if isinstance(error, TransferError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return type(error).__name__


def _trace_of(span: Span) -> str:
    match = _TRACEPARENT.fullmatch(span.traceparent)
    return match[1] if match else ""
