"""Export of spans to an OpenTelemetry collector over HTTP. Needs the extra ``otel``.

A thread of the library exports from a bounded queue that drops the excess: a slow or missing
collector loses spans, but delays nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..version import version
from .tracing import TRACEPARENT, Span, Value

log = logging.getLogger("tandem.tracing")

TRACES_PATH = "/v1/traces"
EXPORT_SECONDS = 5.0
# Short, so that traces are visible soon and a process exits quickly.
BATCH_SECONDS = 1.0
FLUSH_SECONDS = 2.0
MAX_QUEUED = 4096
MAX_BATCH = 512
LOG_SECONDS = 60.0

_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracer:
    """See ``Tracer``. ``endpoint`` is the collector's base address, as OpenTelemetry defines it."""

    def __init__(self, endpoint: str, role: str, node_id: str) -> None:
        # The library logs once per batch; ``_RateLimitedExporter`` logs instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        base = endpoint.rstrip("/").removesuffix(TRACES_PATH)
        self._exporter = _RateLimitedExporter(
            OTLPSpanExporter(endpoint=base + TRACES_PATH, timeout=EXPORT_SECONDS), base
        )
        processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED,
            max_export_batch_size=MAX_BATCH,
            schedule_delay_millis=BATCH_SECONDS * 1000,
        )
        self._provider = TracerProvider(resource=_resource(role, node_id), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem")

    def begin(self, name: str, traceparent: str, **attributes: Value) -> Span:
        context = _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())
        return _begin(self._tracer, name, context, SpanKind.SERVER, attributes)

    def close(self) -> None:
        """Flush with a deadline: the library would wait half a minute for each batch."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            self._exporter.shutdown()  # aborts this export and any further one
            flushing.join(FLUSH_SECONDS)


class _OtlpSpan:
    """See ``Span``. The library's spans ignore everything after their end."""

    def __init__(self, tracer: OtelTracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier.get(TRACEPARENT, "")

    def child(self, name: str, **attributes: Value) -> Span:
        context = set_span_in_context(self._span, Context())
        return _begin(self._tracer, name, context, SpanKind.INTERNAL, attributes)

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, _prefixed(attributes))

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_prefixed(attributes))

    def end(self, failure: str = "") -> None:
        if not self._span.is_recording():
            return
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


class _RateLimitedExporter(SpanExporter):
    """Logs failed exports at most once a minute."""

    def __init__(
        self, inner: SpanExporter, address: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._address = address
        self._clock = clock
        self._lost = 0
        self._logged_at = float("-inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            if self._clock() - self._logged_at >= LOG_SECONDS:
                self._logged_at = self._clock()
                log.warning(
                    "%s does not accept traces (%d spans lost so far); see --otlp-endpoint",
                    self._address,
                    self._lost,
                )
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _begin(
    tracer: OtelTracer, name: str, context: Context, kind: SpanKind, attributes: dict[str, Value]
) -> Span:
    span = tracer.start_span(name, context=context, kind=kind, attributes=_prefixed(attributes))
    return _OtlpSpan(tracer, span)


def _prefixed(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"tandem.{name}": value for name, value in attributes.items()}


def _resource(role: str, node_id: str) -> Resource:
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"tandem-{role}",
            "service.instance.id": node_id,
            "service.version": version(),
        }
    )
