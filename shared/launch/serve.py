"""``tandem serve``: a cluster on one machine, started by one command."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..config import (
    EngineConfig,
    HandoffConfig,
    RouterConfig,
    SecurityConfig,
    ServeConfig,
    TelemetryConfig,
)
from ..config.command_line import fill, to_arguments
from ..errors import PeerRefusedError, StartupError, UnavailableError, UsageError
from ..host_port import is_loopback, join_host_port
from ..node.announce import announce_to_router
from ..process.signals import interrupt_on_signals
from ..process.threads import share_of_cores
from ..security.credentials import Credentials, open_url, read_credentials
from ..security.local_token import make_token, token_file
from ..security.several_hosts import check_hosts
from ..weights.obtain import ObtainedModel, obtain_model
from .cluster import LocalCluster, ProcessSpec
from .gpus import engines_of, gpus_by_node, usable_gpus
from .greeting import greeting
from .log_folders import log_folder_of_start
from .mps import limit_of_prefill
from .routers import Routers, reachable, security_of_parts

Values = dict[str, Any]

# Default address of --pd-server and --pd-client.
SAME_HOST = "127.0.0.1:8100"
# Time limit for a prefill node of --pd-client to reply once everything else serves.
PREFILL_SECONDS = 5.0
# Time limit for listening nodes to join their router.
JOIN_SECONDS = 300.0
# Interval of queries whether the router rejects a node.
REFUSAL_SECONDS = 1.0
READY_POLL_SECONDS = 0.05
# Series of a router that count its requests.
IN_PROGRESS = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")


@dataclass(frozen=True, slots=True)
class RegistryClient:
    """Queries to a router's registry, from the router's package, which this one must not import."""

    check: Callable[[str, Credentials], object]
    refusal_of: Callable[[str, set[str], Credentials], str]
    can_serve: Callable[[str, Credentials], bool]

    def reason(self, addresses: list[str], started: set[str], credentials: Credentials) -> str:
        """The reason why a router rejects a node; empty if it does not, or does not reply."""
        try:
            reasons = [self.refusal_of(each, started, credentials) for each in addresses]
        except UnavailableError:  # a busy machine: the next query decides
            return ""
        return next(filter(None, reasons), "")

    def all_serve(self, addresses: list[str], credentials: Credentials) -> bool:
        """True if each router has a decode node that it can reach."""
        try:
            return all(self.can_serve(each, credentials) for each in addresses)
        except UnavailableError:
            return False


def serve_cluster(
    config: ServeConfig,
    values: Values,
    environment: Mapping[str, str],
    registry: RegistryClient,
    use: Callable[[str], None] | None = None,
) -> None:
    """Start the parts, wait until they are ready, and keep them serving until a signal, or while
    ``use`` runs, which gets the router's URL.

    ``values`` are the parsed options of all parts, ``environment`` their environment without
    Tandem's own variables. Raises ``UsageError`` or ``StartupError``.
    """
    values = _with_defaults(config, values)
    credentials = read_credentials(fill(SecurityConfig, values))
    check_hosts(fill(EngineConfig, values), fill(HandoffConfig, values), credentials)
    front = fill(RouterConfig, values)
    own_token = not credentials.tokens and is_loopback(front.registry_host)
    if own_token:
        values = values | {"cluster_token": make_token()}
        credentials = read_credentials(fill(SecurityConfig, values))
    interrupt_on_signals()
    start_seconds = config.start_timeout or fill(EngineConfig, values).start_timeout
    try:
        # Before a log folder is created, so that failed starts do not displace older logs.
        model = _obtain(fill(EngineConfig, values))
        values = values | {"model": model.name}
    except KeyboardInterrupt:
        _tell_stopping([], front)
        return
    pages: list[str] = []
    interrupted = False
    with contextlib.ExitStack() as until_end:
        logs = until_end.enter_context(log_folder_of_start(Path(config.log_dir)))
        cluster = LocalCluster(
            logs,
            environment,
            front.shutdown_delay + front.drain_timeout,
            start_seconds=start_seconds,
            tell=lambda line: _tell(f"tandem: {line}"),
        )
        routers = Routers(cluster, values)
        until_end.callback(routers.close)
        try:
            deadline = time.monotonic() + start_seconds
            routers.start(deadline)
            joins_at = routers.registries
            nodes = start_nodes(cluster, config, values, joins_at)
            ready = routers.wait_ready(deadline)
            address = _url_of(front.host, ready[0]["http"])
            pages = [
                _url_of(front.metrics_host or front.host, ports["metrics"])
                if "metrics" in ports
                else address
                for ports in ready
            ]
            if credentials.encrypted:
                # Fails if the certificate has another name, with which no node could join.
                registry.check(joins_at[0], credentials)
            for each in joins_at if own_token else ():
                publish_token(until_end, token_file(each, credentials.token, address))
            started = {cluster.wait_ready(node, deadline).get("address", "") for node in nodes}
            await_ready(
                cluster,
                address,
                min(deadline, time.monotonic() + JOIN_SECONDS),
                refusal=partial(registry.reason, joins_at, started, credentials),
                all_serve=partial(registry.all_serve, joins_at, credentials),
            )
            for each in joins_at:
                _announce_prefill_nodes(front.prefill_addresses, each, credentials)
            if use is None:
                apart = config.prefill_nodes > 0 or bool(front.prefill_addresses)
                for line in greeting(
                    address, joins_at, front, logs.resolve(), model.scoring, prefill_nodes=apart
                ):
                    click.echo(line)
                cluster.keep(routers.parts, lambda: is_ready(address))
            else:
                _keep_during(cluster, routers.parts, address, use)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            cluster.stop(partial(_tell_stopping, pages, front) if interrupted else None)


def _obtain(engine: EngineConfig) -> ObtainedModel:
    """Download the model before any part needs it, so that this command reports its errors and the
    progress. The parts get its resolved name, so that a restarted part uses the same version.
    Raises ``ModelError``."""
    model = obtain_model(engine)
    model.source.tokenizer_files()
    return model


def _keep_during(
    cluster: LocalCluster, routers: list[ProcessSpec], address: str, use: Callable[[str], None]
) -> None:
    """Run ``use`` while a thread keeps the parts serving."""
    over = threading.Event()

    def keep() -> None:
        try:
            cluster.keep(routers, lambda: is_ready(address), over.is_set)
        except StartupError as error:
            click.echo(f"tandem: {error}", err=True)

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        use(address)
    finally:
        over.set()
        keeper.join()


def _with_defaults(config: ServeConfig, values: Values) -> Values:
    """The options, with the default address of ``--pd-client``. Raises ``UsageError`` for options
    of another role."""
    if config.pd_client:
        values = values | {"pd_url": values["pd_url"] or SAME_HOST}
    if values["kv_advertise"] is not None:
        raise UsageError("--kv-advertise is for one prefill node; it needs --pd-server")
    if fill(RouterConfig, values).prefill_addresses and not config.pd_client:
        raise UsageError("--pd-url needs --pd-client or --pd-server")
    return values


def publish_token(
    until_end: contextlib.ExitStack, token: contextlib.AbstractContextManager[None]
) -> None:
    """Publish the token to this user's other commands; if that fails, the cluster serves anyway."""
    try:
        until_end.enter_context(token)
    except (StartupError, OSError) as error:
        click.echo(f"tandem: other commands need --cluster-token-file: {error}", err=True)


def _url_of(host: str, port: int) -> str:
    return f"http://{join_host_port(reachable(host), port)}"


def start_nodes(
    cluster: LocalCluster, config: ServeConfig, values: Values, registries: list[str]
) -> list[ProcessSpec]:
    """Start the nodes; does not wait for them."""
    kinds = ["prefill-node"] * config.prefill_nodes + ["decode-node"] * config.decode_nodes
    names = [f"{kind}-{number}" for number, kind in enumerate(kinds)]
    engine, handoff = fill(EngineConfig, values), fill(HandoffConfig, values)
    gpus = usable_gpus(engine)
    engines = engines_of(engine, len(kinds), gpus, share=config.share_devices)
    ranks = engines[0].ranks_per_host
    # If every node used all cores, their threads would wait for each other.
    threads = engine.threads or share_of_cores(len(kinds) * ranks)
    limited = {
        name
        for name, engine in zip(names[: config.prefill_nodes], engines, strict=False)
        if gpus and engine.nodes_per_device != 1
    }
    percent = config.prefill_gpu_share
    if config.pd_client and not config.prefill_nodes:
        percent = None  # of the prefill nodes, whose command may read the same file of options
    limit = limit_of_prefill(percent, shares=bool(limited))
    for line in gpus_by_node(names, engines):
        click.echo(line, err=True)
    security, secrets = security_of_parts(values)
    common = [
        *to_arguments(fill(TelemetryConfig, values)),
        *security,
        f"--join={','.join(registries)}",
        f"--drain-timeout={values['drain_timeout']}",
        f"--stats-interval={values['stats_interval']}",
    ]
    parts = []
    for number, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        own = replace(handoff, kv_port=handoff.kv_port_of(number * ranks))
        engine = replace(engines[number], threads=threads)
        arguments = [kind, *common, *to_arguments(engine), *to_arguments(own)]
        own_limit = limit if name in limited else {}
        parts.append(cluster.start(name, arguments, **secrets, **own_limit))
    return parts


def await_ready(
    cluster: LocalCluster,
    address: str,
    deadline: float,
    *,
    refusal: Callable[[], str],
    all_serve: Callable[[], bool],
) -> None:
    """Wait until each router has a decode node: nodes join a moment after they listen.

    Raises ``StartupError`` if a part exits, if a router rejects one of the nodes, or at
    ``deadline`` (monotonic).
    """
    check_at = time.monotonic() + REFUSAL_SECONDS
    while time.monotonic() < deadline:
        cluster.check()
        if is_ready(address) and all_serve():
            return
        if time.monotonic() >= check_at:
            if reason := refusal():
                raise StartupError(f"the router rejects a node: {reason}")
            check_at = time.monotonic() + REFUSAL_SECONDS
        time.sleep(READY_POLL_SECONDS)
    raise StartupError(
        f"all parts listen, but {address}/ready did not answer in time: no decode node has joined; "
        "see the nodes' logs"
    )


def is_ready(address: str) -> bool:
    """True if a decode node accepts requests from the router at ``address``."""
    try:
        with open_url(f"{address}/ready", seconds=2):
            return True
    except OSError:  # includes a status of 503
        return False


def _announce_prefill_nodes(
    addresses: tuple[str, ...], registry: str, credentials: Credentials
) -> None:
    """Join the prefill nodes of ``--pd-url`` to the router. Raises ``StartupError`` if none
    replies."""
    deadline = time.monotonic() + PREFILL_SECONDS
    missing = []
    for address in addresses:
        try:
            announce_to_router(address, registry, deadline, credentials)
        except UnavailableError as error:
            missing.append(str(error))
        except PeerRefusedError as error:
            raise StartupError(f"--pd-url {error}") from None
    if missing and len(missing) == len(addresses):
        raise StartupError(
            f"--pd-url: {'; '.join(missing)}. Start it first (tandem serve MODEL --pd-server), or "
            "correct the address"
        )
    for problem in missing:
        click.echo(f"tandem: {problem}; it will be used once it answers", err=True)


def _tell(line: str) -> None:
    """Print a line to standard error; its terminal may be closed."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _tell_stopping(pages: list[str], front: RouterConfig) -> None:
    """Print how long the end may take. ``pages`` are the URLs of the routers' metrics; empty if
    they do not serve yet."""
    counts = [requests_at(page) for page in pages]
    _tell(stopping(None if None in counts else sum(filter(None, counts)), front))


def stopping(requests: int | None, front: RouterConfig) -> str:
    """The line for routers with ``requests`` in progress; ``None`` if their number is unknown."""
    seconds = front.shutdown_delay + front.drain_timeout
    if not requests and (requests is not None or not seconds):
        return "stopping ..."
    what = "running responses" if requests is None else f"{requests} response{'s'[: requests != 1]}"
    return (
        f"stopping: waiting up to {seconds:g} s for {what} to finish; press Ctrl-C again to stop "
        "now"
    )


def requests_at(url: str) -> int | None:
    """Number of requests in progress at a router; ``None`` if its metrics are not public."""
    try:
        with open_url(f"{url}/metrics", seconds=1) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return None
    counts = (line.rpartition(" ")[2] for line in lines if line.startswith(IN_PROGRESS))
    return int(sum(map(float, counts)))
