"""Spans of a request, on its way through the parts.

Nothing here knows a tracing library: spans begin at a ``Tracer``, and everything below a span
begins at the span. Without ``--otlp-endpoint`` they are ``_Untraced``, which records nothing, but
still hands on the trace that a client has begun. ``otlp.py`` has those that are exported.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol
from urllib.parse import urlsplit

from ..errors import TransferError, UsageError
from .logs import REQUEST_ID_HEADER, add_log_context, current_log_context

# The header of W3C Trace Context: version, trace, span, flags.
TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool
Metadata = tuple[tuple[str, str], ...]


class Span(Protocol):
    """Something that takes time. Safe to use after its end, when it records nothing any more."""

    @property
    def traceparent(self) -> str:
        """Names this span to another process; empty when there is nothing to name."""

    def child(self, name: str, **attributes: Value) -> Span:
        """Begin a span below this one; whoever begins it ends it."""

    def event(self, name: str, **attributes: Value) -> None:
        """Something happened now."""

    def set(self, **attributes: Value) -> None:
        """What is known only later."""

    def end(self, failure: str = "") -> None:
        """Idempotent."""


class Tracer(Protocol):
    """Begins the spans of one process, and gets them out."""

    def begin(self, name: str, traceparent: str, **attributes: Value) -> Span:
        """A span below another process's, or a new trace when ``traceparent`` is empty."""

    def close(self) -> None:
        """Export what has ended, within a deadline."""


class _Untraced:
    """Below it nothing is recorded either."""

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


def start_tracer(endpoint: str | None, role: str, node_id: str) -> Tracer:
    """The tracer of this process. Raises ``UsageError`` when it cannot be had."""
    if endpoint is None:
        return NO_TRACER
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise UsageError(
            f"--otlp-endpoint {endpoint!r} is not an http:// or https:// address, such as "
            f"http://127.0.0.1:4318"
        )
    try:
        from .otlp import OtlpTracer
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing); install it with: "
            f"pip install 'tandem-llm[otel]'"
        ) from None
    return OtlpTracer(endpoint, role, node_id)


def current() -> Span:
    """The span that the running task works on."""
    return _current.get()


@contextmanager
def serving(tracer: Tracer, name: str, traceparent: str, **attributes: Value) -> Iterator[Span]:
    """The span of a whole request, in a task that belongs to it alone: nothing is put back, so it
    may stand around the ``yield`` of a handler that streams."""
    valid = _TRACEPARENT.fullmatch(traceparent) is not None
    span = tracer.begin(name, traceparent if valid else "", **attributes)
    _current.set(span)
    add_log_context(trace_id=_trace_of(span))
    with _ending(span):
        yield span


@contextmanager
def step(name: str, **attributes: Value) -> Iterator[Span]:
    """A span below the current one, and current itself. Not around the ``yield`` of a generator:
    see ``branch``."""
    span = current().child(name, **attributes)
    token = _current.set(span)
    try:
        with _ending(span):
            yield span
    finally:
        _current.reset(token)


@contextmanager
def branch(name: str, **attributes: Value) -> Iterator[Span]:
    """A span below the current one, for generators: it does not become the current one."""
    span = current().child(name, **attributes)
    with _ending(span):
        yield span


def metadata(span: Span) -> Metadata:
    """What a call to another part carries, so that its spans and logs say whose they are."""
    carried = (
        (REQUEST_ID_HEADER, current_log_context().request_id),
        (TRACEPARENT, span.traceparent),
    )
    return tuple((key, value) for key, value in carried if value)


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    try:
        yield
    except GeneratorExit:
        span.end()  # whoever reads has all that it wanted
        raise
    except BaseException as error:
        span.end(_failure(error))
        raise
    span.end()


def _failure(error: BaseException) -> str:
    """What a trace may say of an error; messages about requests may quote the client."""
    if isinstance(error, TransferError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return type(error).__name__


def _trace_of(span: Span) -> str:
    match = _TRACEPARENT.fullmatch(span.traceparent)
    return match[1] if match else ""
