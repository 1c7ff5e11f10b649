"""Spans without a collector, and with a collector that cannot be reached."""

from __future__ import annotations

import builtins
import logging
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tandem.shared.errors import UsageError
from tandem.shared.telemetry import otlp, tracing
from tandem.shared.telemetry.logs import log_context
from tandem.shared.telemetry.start_tracer import start_tracer
from tandem.shared.telemetry.tracing import NO_TRACER, metadata, serving, step

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_client_s_trace_is_handed_on_by_a_part_that_exports_nothing() -> None:
    with serving(NO_TRACER, "request", PARENT) as span, log_context(request_id="r1"):
        with step("placement") as below:
            assert metadata(below) == (("x-request-id", "r1"), ("traceparent", PARENT))
        assert span.traceparent == PARENT


@pytest.mark.parametrize("value", ["", "00-zz", PARENT + "\r\nx: y", PARENT.upper(), "é"])
def test_an_invalid_traceparent_is_dropped(value: str) -> None:
    with serving(NO_TRACER, "request", value) as span:
        assert metadata(span) == ()


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", ""])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not an http:// or https:// address"):
        start_tracer(endpoint, "router", "r")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def lacking(name: str, *rest: Any) -> Any:
        if name == "otlp":
            raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(UsageError, match=r"pip install '\.\[otel\]'"):
        start_tracer("http://127.0.0.1:4318", "router", "r")


def test_a_collector_that_is_not_there_delays_neither_spans_nor_the_end() -> None:
    before = set(threading.enumerate())
    tracer = start_tracer("http://127.0.0.1:1", "router", "r")
    for _ in range(3 * otlp.MAX_QUEUED):
        tracer.begin("request", PARENT).end()
    tracer.close()
    assert set(threading.enumerate()) <= before  # others may have ended meanwhile


def test_lost_spans_are_logged_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.FAILURE

    now = [0.0]
    exporter = otlp._RateLimitedExporter(Refusing(), "http://collector", lambda: now[0])
    with caplog.at_level(logging.WARNING, "tandem.tracing"):
        for _ in range(5):
            exporter.export([None] * 10)  # type: ignore[list-item]
        now[0] = otlp.LOG_SECONDS
        exporter.export([])
    assert [record.message.split("(")[1].split()[0] for record in caplog.records] == ["10", "50"]


def test_a_failure_ends_a_span_once_and_quotes_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.01)
    tracer = start_tracer("http://127.0.0.1:1", "router", "r")
    with pytest.raises(ValueError), serving(tracer, "request", PARENT) as span:
        raise ValueError("the prompt")
    assert isinstance(span, otlp._OtlpSpan)
    assert span._span.status.description == "ValueError"  # type: ignore[attr-defined]
    span.end("again")
    assert tracing.current() is span  # the task was the request's alone
    tracer.close()


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "tandem-router"), ("", "tandem-router"), ("mine", "mine")]
)
def test_a_service_may_be_given_another_name(
    value: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    if value is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", value)
    assert otlp._resource("router", "r1").attributes["service.name"] == expected
