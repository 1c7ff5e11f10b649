"""Context of RPCs from other parts: the request id for logs, the parent span for traces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import grpc

from ..telemetry.logs import REQUEST_ID_HEADER, add_log_context, checked_request_id
from ..telemetry.tracing import TRACEPARENT, Span, Tracer, Value, serving


class Caller(NamedTuple):
    """What an RPC carries beside its message: the request id, and the span that it belongs to."""

    request_id: str = ""
    traceparent: str = ""


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """The caller, by the metadata of an RPC."""
    given = {key: value for key, value in context.invocation_metadata() or () if _is_text(value)}
    return Caller(str(given.get(REQUEST_ID_HEADER, "")), str(given.get(TRACEPARENT, "")))


def serving_rpc(
    tracer: Tracer, name: str, caller: Caller, **attributes: Value
) -> AbstractContextManager[Span]:
    """The span of one RPC, which runs in a task of its own."""
    request_id = checked_request_id(caller.request_id)
    add_log_context(request_id=request_id)
    return serving(tracer, name, caller.traceparent, request_id=request_id, **attributes)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
