"""Deadlines that clients and gateways set in a header."""

from __future__ import annotations

from math import inf

from ..errors import ApiError
from .exchange import HttpExchange

# Header name, and its unit in seconds. Envoy sends its own timeout in the second one.
HEADERS = ((b"x-request-timeout", 1.0), (b"x-envoy-expected-rq-timeout-ms", 0.001))


def seconds_allowed(exchange: HttpExchange, limit: float) -> float:
    """Seconds until the deadline of a request: ``limit``, or less if a header says so. Raises
    ``ApiError`` for a header that is not a positive number."""
    return min(limit, *(_seconds(exchange, name, unit) for name, unit in HEADERS))


def _seconds(exchange: HttpExchange, name: bytes, unit: float) -> float:
    text = exchange.header(name).decode("latin-1")
    if not text:
        return inf
    try:
        seconds = float(text) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        kind = "seconds" if unit == 1 else "milliseconds"
        header = name.decode()
        raise ApiError(
            400, f"Invalid header '{header}': {text[:64]!r} is not a number of {kind} above 0."
        )
    return seconds
