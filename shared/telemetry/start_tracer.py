"""The tracer of a process, chosen by ``--otlp-endpoint``."""

from __future__ import annotations

from urllib.parse import urlsplit

from ..errors import UsageError
from ..version import install_command
from .tracing import NO_TRACER, Tracer


def start_tracer(endpoint: str | None, role: str, node_id: str) -> Tracer:
    """The tracer of this process. Raises ``UsageError`` for a bad endpoint or a missing library."""
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
            f"{install_command('otel')}"
        ) from None
    return OtlpTracer(endpoint, role, node_id)
