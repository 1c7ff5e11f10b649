"""An OpenTelemetry collector that a test can ask: HTTP in, spans by name out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span, as it came."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    error: str
    attributes: dict[str, Any]
    events: dict[str, int]  # nanoseconds since 1970 by name, in order


@dataclass
class Collector:
    url: str = ""
    spans: list[Seen] = field(default_factory=list)

    def spans_of(self, name: str, trace: str) -> list[Seen]:
        return [span for span in self.spans if (span.name, span.trace) == (name, trace)]

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(group.resource.attributes)["service.name"]
            for scope in group.scope_spans:
                self.spans += [_parse_span(span, service) for span in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not into the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _parse_span(span: Any, service: str) -> Seen:
    return Seen(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.status.message,
        _plain(span.attributes),
        {event.name: event.time_unix_nano for event in span.events},
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {
        item.key.removeprefix("tandem."): getattr(item.value, item.value.WhichOneof("value"))
        for item in attributes
    }
