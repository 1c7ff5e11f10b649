"""Context of calls from other parts: the request id for logs, the parent span for traces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import grpc

from ..telemetry.logs import REQUEST_ID_HEADER, add_log_context, checked_request_id
from ..telemetry.tracing import TRACEPARENT, Span, Tracer, Value, serving


def serving_call(
    tracer: Tracer,
    name: str,
    context: grpc.aio.ServicerContext[Any, Any],
    **attributes: Value,
) -> AbstractContextManager[Span]:
    """The span of one RPC, which gRPC runs in a task of its own."""
    given = {key: value for key, value in context.invocation_metadata() or () if _is_text(value)}
    request_id = checked_request_id(str(given.get(REQUEST_ID_HEADER, "")))
    add_log_context(request_id=request_id)
    traceparent = str(given.get(TRACEPARENT, ""))
    return serving(tracer, name, traceparent, request_id=request_id, **attributes)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
