"""The routers of a launcher: one, or ``--router-workers`` of them on one HTTP port.

Several routers are independent of each other. The system divides new connections among them
(``SO_REUSEPORT``), every node joins each, and each has its own ports for registry and metrics."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..config import RouterConfig, SecurityConfig, TelemetryConfig
from ..config.batches import OFF
from ..config.command_line import fill, to_arguments
from ..errors import UsageError
from ..host_port import is_wildcard, join_host_port
from ..process import acceptor
from ..process.lifeline import ROUTER_NUMBER, announce_ready, end_with_launcher
from ..process.signals import interrupt_on_signals
from .cluster import LocalCluster, ProcessSpec

Values = dict[str, Any]
MAX_PORT = 65535
# Options that other users must not read in the arguments; a storage's URL has its password.
SECRETS = ("api_key", "admin_api_key", "limits_storage")


class Routers:
    """Call ``start``, then ``wait_ready``, and ``close`` last. ``registries`` are the addresses
    that nodes join, one for each of the ``parts``."""

    def __init__(self, cluster: LocalCluster, values: Values) -> None:
        self.parts: list[ProcessSpec] = []
        self.registries: list[str] = []
        self._cluster = cluster
        self._front = front = fill(RouterConfig, values)
        security, secrets = security_of_parts(values)
        self._arguments = [*security, *to_arguments(fill(TelemetryConfig, values))]
        values_of = {f"TANDEM_{name.upper()}": getattr(front, name) for name in SECRETS}
        self._secrets = secrets | {name: value for name, value in values_of.items() if value}
        self._configs: list[RouterConfig] = []
        self._port: socket.socket | None = None

    def start(self, deadline: float) -> None:
        """Start the routers, and wait until their registries have ports: nodes load while the rest
        of a router starts. Raises ``UsageError`` or ``StartupError``."""
        front, count = self._front, self._front.router_workers
        if count == 1:
            self._start("router", front)
        else:
            self._configs = configs_of(front)
            self._port = _hold_port(front)
            port = self._port.getsockname()[1]
            self._configs = [replace(config, port=port) for config in self._configs]
            for number, config in enumerate(self._configs):
                self._start(f"router-{number}", config, **{ROUTER_NUMBER: str(number)})
        for part in self.parts:
            registry = self._cluster.wait_starting(part, deadline)["registry"]
            self.registries.append(join_host_port(reachable(front.registry_host), registry))

    def wait_ready(self, deadline: float) -> list[dict[str, int]]:
        """The ports of each router, once all serve. A restarted router gets the same ones."""
        ready = [self._cluster.wait_ready(part, deadline) for part in self.parts]
        for part, config, ports in zip(self.parts, self._configs, ready, strict=False):
            own = {"registry_port": ports["registry"], "metrics_port": ports.get("metrics")}
            part.arguments = self._arguments_of(replace(config, **own))
        return ready

    def close(self) -> None:
        """Release the port. Idempotent."""
        if self._port is not None:
            self._port.close()

    def _start(self, name: str, config: RouterConfig, **environment: str) -> None:
        arguments = self._arguments_of(config)
        part = self._cluster.start(name, arguments, **self._secrets, **environment)
        self.parts.append(part)

    def _arguments_of(self, config: RouterConfig) -> list[str]:
        public = to_arguments(config, without=SECRETS)
        return ["router", *public, *self._arguments]


def configs_of(front: RouterConfig) -> list[RouterConfig]:
    """The options of each of several routers: its own ports, and its part of the common limits.
    Raises ``UsageError``."""
    count = front.router_workers

    def part(whole: int, minimum: int = 1) -> int:
        return max(minimum, -(-whole // count))

    share = replace(
        front,
        max_concurrent_requests=part(front.max_concurrent_requests),
        max_connections=part(front.max_connections),
        max_held_body_bytes=part(front.max_held_body_bytes, front.max_body_bytes),
        max_held_prompt_tokens=part(front.max_held_prompt_tokens, 1024),
        max_held_response_bytes=part(front.max_held_response_bytes, front.max_response_bytes),
        # As for a single router on a random port.
        batch_dir=front.batch_dir or (OFF if front.port == 0 else None),
    )
    registries = [front.registry_port and front.registry_port + n for n in range(count)]
    metrics = [front.metrics_port and front.metrics_port + n for n in range(count)]
    fixed = [port for port in (front.port, *registries, *metrics) if port]
    if len(set(fixed)) < len(fixed) or max(fixed, default=0) > MAX_PORT:
        raise UsageError(
            f"--router-workers {count} takes {count} ports from --registry-port on, and from "
            f"--metrics-port; choose them so that no port is taken twice or above {MAX_PORT}"
        )
    return [
        replace(share, registry_port=registry, metrics_port=page)
        for registry, page in zip(registries, metrics, strict=True)
    ]


def _hold_port(front: RouterConfig) -> socket.socket:
    """Bind the routers' HTTP port for the life of the launcher. Raises ``StartupError``.

    A shared socket would not fail if another launcher of this user had the port, so it is first
    bound exclusively."""
    host = front.host
    try:
        with acceptor.listen(host, front.port, 1) as alone:
            port = alone.getsockname()[1]
        return acceptor.bind(host, port, shared=True)
    except OSError as error:
        raise acceptor.http_port_error(host, front.port, error) from error


def serve_routers(
    values: Values, environment: Mapping[str, str], tell: Callable[[str], None]
) -> None:
    """``tandem router --router-workers N``: start the routers, which log to this process's standard
    error, and keep them serving until a signal.

    ``tell`` is called with a line whenever one starts or ends. Raises ``UsageError`` or
    ``StartupError``."""
    front = fill(RouterConfig, values)
    interrupt_on_signals()
    seconds = front.shutdown_delay + front.drain_timeout
    cluster = LocalCluster(None, environment, seconds, start_seconds=math.inf, tell=tell)
    with closing(Routers(cluster, values)) as routers:
        try:
            routers.start(math.inf)
            ready = routers.wait_ready(math.inf)
            end_with_launcher()
            announce_ready({**ready[0], "routers": ready})
            cluster.keep(routers.parts, lambda: True)
        except KeyboardInterrupt:
            tell("stopping")
        finally:
            cluster.stop()


def security_of_parts(values: Values) -> tuple[list[str], dict[str, str]]:
    """The credentials of all parts, as flags and as environment variables, which other users cannot
    read."""
    security = fill(SecurityConfig, values)
    token = security.cluster_token
    secrets = {"TANDEM_CLUSTER_TOKEN": token} if token else {}
    return to_arguments(replace(security, cluster_token=None)), secrets


def reachable(host: str) -> str:
    """The host at which this machine reaches a server that listens on ``host``."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"
