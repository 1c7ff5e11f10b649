"""Options of a node's head process, and of logs and traces of any process."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..host_port import is_wildcard, split_host_port
from . import fields
from .fields import option, split_addresses
from .limits import MAX_CONNECTIONS


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Options of logs and traces."""

    log_format: str = option(
        "text",
        "--log-format",
        "Log format: text for people, or JSON for programs.",
        choices=("text", "json"),
    )
    log_level: str = option(
        "info",
        "--log-level",
        "Minimum level of logged lines.",
        choices=("debug", "info", "warning", "error"),
    )
    otlp_endpoint: str | None = option(
        None,
        "--otlp-endpoint",
        "OpenTelemetry collector that receives a trace of each request, such as "
        "http://127.0.0.1:4318 (default: none). Needs the extra 'otel'.",
        environment=("OTEL_EXPORTER_OTLP_ENDPOINT",),
    )


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Options of a node's head process: where it listens, and which routers it joins."""

    host: str = option(
        "127.0.0.1", "--host", "Address on which the control plane listens.", host=True
    )
    port: int = option(
        0, "--port", "Port of the control plane (0: any free port).", minimum=0, maximum=65535
    )
    health_port: int = option(
        0, "--health-port", "Port of /health, /ready and /metrics.", minimum=0, maximum=65535
    )
    join: str | None = option(
        None, "--join", "Registries of the routers to join, as host:port, separated by commas."
    )
    node_id: str | None = option(None, "--node-id", "Name of this node (default: generated).")
    advertise: str | None = option(
        None,
        "--advertise",
        "host:port at which others reach this node (default: the address that it listens on; with "
        "--host 0.0.0.0 or ::, this machine's address on the route to each router).",
    )
    drain_timeout: float = option(
        30.0,
        "--drain-timeout",
        "Seconds for running requests to finish after SIGTERM, SIGINT or SIGHUP; a second SIGTERM "
        "or SIGINT ends them at once.",
        minimum=0.0,
    )
    max_connections: int = option(
        MAX_CONNECTIONS,
        "--max-connections",
        "Maximum number of connections to the control plane, or fewer if the limit of open files "
        "requires it; further ones are closed at once.",
        minimum=1,
    )
    stats_interval: float = fields.stats_interval()

    @property
    def routers(self) -> tuple[str, ...]:
        return split_addresses("--join", self.join)

    @property
    def advertised(self) -> str:
        """The address of ``--advertise``; empty without it. Raises ``UsageError``."""
        addresses = split_addresses("--advertise", self.advertise)
        if len(addresses) > 1:
            raise UsageError(f"--advertise {self.advertise!r}: a node has one address")
        if addresses and is_wildcard(split_host_port(addresses[0])[0]):
            raise UsageError(
                f"--advertise {self.advertise!r} is a wildcard, at which others cannot reach this "
                f"node; give this machine's address, or leave the option out"
            )
        return addresses[0] if addresses else ""
