"""Options of a node's head process, and of what any process reports."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from . import fields
from .fields import option, split_addresses


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What a process tells of its work, beside its metrics."""

    log_format: str = option(
        "text",
        "--log-format",
        "Lines of the log: for people, or for programs.",
        choices=("text", "json"),
    )
    log_level: str = option(
        "info",
        "--log-level",
        "The least important lines of the log that are written.",
        choices=("debug", "info", "warning", "error"),
    )
    otlp_endpoint: str | None = option(
        None,
        "--otlp-endpoint",
        "OpenTelemetry collector that gets a trace of each request, such as "
        "http://127.0.0.1:4318 (default: none). Needs the extra 'otel'.",
        environment=("OTEL_EXPORTER_OTLP_ENDPOINT",),
    )


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One head process: where it listens, and which routers it joins."""

    host: str = option("127.0.0.1", "--host", "Address to listen on.")
    port: int = option(
        0, "--port", "Port of the control plane (0: any free one).", minimum=0, maximum=65535
    )
    health_port: int = option(
        0, "--health-port", "Port of /health, /ready and /metrics.", minimum=0, maximum=65535
    )
    join: str | None = option(
        None, "--join", "Registries of the routers to join, host:port, separated by commas."
    )
    node_id: str | None = option(None, "--node-id", "Name of this node (default: made up).")
    advertise: str | None = option(
        None, "--advertise", "host:port that others reach this node at, if not what it listens on."
    )
    drain_timeout: float = option(
        30.0, "--drain-timeout", "Seconds that SIGTERM leaves running requests.", minimum=0.0
    )
    stats_interval: float = fields.stats_interval()

    @property
    def routers(self) -> tuple[str, ...]:
        return split_addresses("--join", self.join)

    @property
    def advertised(self) -> str:
        """Where others reach this node; empty: where it listens. Raises ``UsageError``."""
        addresses = split_addresses("--advertise", self.advertise)
        if len(addresses) > 1:
            raise UsageError(f"--advertise {self.advertise!r}: a node has one address")
        return addresses[0] if addresses else ""
