"""Context of RPCs from other parts: a request id for logs, a parent span for traces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import grpc

from ..telemetry.logs import REQUEST_ID_HEADER, add_log_context, checked_request_id
from ..telemetry.tracing import TRACEPARENT, Span, Tracer, Value, serving


class RpcContext(NamedTuple):
    """Metadata of an RPC: the request id, and the parent span."""

    request_id: str = ""
    traceparent: str = ""


def rpc_context_of(context: grpc.aio.ServicerContext[Any, Any]) -> RpcContext:
    """The context of an RPC."""
    values = {key: value for key, value in context.invocation_metadata() or () if _is_text(value)}
    return RpcContext(str(values.get(REQUEST_ID_HEADER, "")), str(values.get(TRACEPARENT, "")))


def serving_rpc(
    tracer: Tracer, name: str, context: RpcContext, **attributes: Value
) -> AbstractContextManager[Span]:
    """The span of one RPC, which must have its own task."""
    request_id = checked_request_id(context.request_id)
    add_log_context(request_id=request_id)
    return serving(tracer, name, context.traceparent, request_id=request_id, **attributes)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
