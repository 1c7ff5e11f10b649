"""The ``tandem`` command: the one file that knows all the parts, each imported when it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .shared.config import (
    EngineConfig,
    HandoffConfig,
    NodeConfig,
    RouterConfig,
    SecurityConfig,
    ServeConfig,
    TelemetryConfig,
    prefill_addresses,
)
from .shared.config.command_line import check_unknown, command_options, fill, to_arguments
from .shared.config.fields import split_addresses
from .shared.errors import (
    PeerRefusedError,
    StartupError,
    TandemError,
    UnavailableError,
    UsageError,
)
from .shared.process.open_files import allow_many_files
from .shared.unix_sockets import folder_of, reserved_folder

if TYPE_CHECKING:
    from .shared.launch.cluster import Cluster, ProcessSpec
    from .shared.node.role_switch import NodeRole
    from .shared.security.credentials import Credentials
    from .shared.telemetry.tracing import Tracer

Values = dict[str, Any]

# Where --pd-server listens and --pd-client looks, when neither says where.
SAME_HOST = "127.0.0.1:8100"
# Of the router's and the launcher's options, those that a prefill node has too.
USED_BY_PD_SERVER = {
    "pd_server",
    "pd_url",
    "model",
    "ignore_config_keys",
    "served_model_name",
    "drain_timeout",
    "insecure",
    "stats_interval",
}
# How long --pd-client waits for a prefill node, when everything else serves.
PREFILL_SECONDS = 5.0
# How long nodes that listen have to join their router.
JOIN_SECONDS = 300.0
# How often tandem serve asks its router whether it refuses one of the nodes.
REFUSAL_SECONDS = 1.0


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tandem")
def cli() -> None:
    """Serve large language models with prefill and decode apart."""
    from .shared.process.lifeline import LIFELINE_FD, READY_FD

    known = {*_variables(), LIFELINE_FD, READY_FD}
    for name in sorted(os.environ):
        if name.startswith("TANDEM_") and not name.startswith("TANDEM_TEST_") and name not in known:
            check_unknown("environment", name, known)


class _PartCommand(click.Command):
    """``--model``, ``--m``, ``--w`` and ``--f`` are one option, of which click would take the last
    and drop the others silently. Raises ``UsageError`` instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        models = [parameter for parameter in order if parameter.name == "model"]
        if len(models) > 1:
            names = ", ".join(models[0].opts)
            raise UsageError(f"the model is given twice: {names} are one option")
        return super().parse_args(ctx, args)


def command(name: str, *configs: type, model: bool = True) -> Callable[[Any], click.Command]:
    """A subcommand whose options are the fields of ``configs``."""

    def wrap(function: Callable[[Values], None]) -> click.Command:
        params: list[click.Parameter] = command_options(*configs)
        if model:
            params.insert(0, click.Argument(["positional"], required=False, metavar="[MODEL]"))

        def run(**values: Any) -> None:
            given = values.pop("positional", None)
            context = click.get_current_context()
            if given is not None:
                source = context.get_parameter_source("model")
                if source is click.core.ParameterSource.COMMANDLINE:
                    raise UsageError(
                        f"the model is given twice: {given!r} and --model {values['model']!r}"
                    )
                values["model"] = given
            function(values)

        made = _PartCommand(name, params=params, callback=run, help=function.__doc__)
        cli.add_command(made)
        return made

    return wrap


def _telemetry(values: Values, role: str, node_id: str) -> Tracer:
    """Logs as they were asked for; the tracer is to be closed last."""
    from .shared.telemetry.logs import LogSettings, setup_logging
    from .shared.telemetry.tracing import start_tracer

    config = fill(TelemetryConfig, values)
    setup_logging(
        LogSettings(form=config.log_format, level=config.log_level, role=role, node_id=node_id)
    )
    return start_tracer(config.otlp_endpoint, role, node_id)


@command("router", RouterConfig, SecurityConfig, TelemetryConfig, model=False)
def router(values: Values) -> None:
    """Start a router: HTTP in, tokens out. The nodes that join bring the model, and must have that
    of --model if it is given."""
    from .router.options import RouterOptions
    from .router.server import Router, run_router
    from .shared.process.lifeline import announce_ready, end_with_launcher
    from .shared.process.signals import catch_signals
    from .shared.security.credentials import read_credentials

    credentials = read_credentials(fill(SecurityConfig, values))

    def ready(router: Router) -> None:
        end_with_launcher()
        ports = {"http": router.http_port, "registry": router.registry_port}
        announce_ready(ports | ({"metrics": router.metrics_port} if router.metrics_port else {}))

    async def run() -> None:
        stop = asyncio.Event()
        catch_signals(stop.set)
        await run_router(fill(RouterOptions, values), stop, ready, tracer, credentials)

    with contextlib.closing(
        _telemetry(values, "router", f"router-{socket.gethostname()}")
    ) as tracer:
        asyncio.run(run())


def _run_node(
    kind: str, values: Values, on_ready: Callable[[str], None] = lambda address: None
) -> None:
    """A node that begins as a prefill or a decode node, and may be told to be the other."""
    from .decode_node.role import DecodeRole
    from .prefill_node.role import PrefillRole
    from .shared.node.process import named, run_node, with_host
    from .shared.process.lifeline import announce_ready, end_with_launcher
    from .shared.security.local_token import find_credentials

    node = named(fill(NodeConfig, values), kind)
    handoff = with_host(fill(HandoffConfig, values), node.host)

    def ready(address: str) -> None:
        end_with_launcher()
        announce_ready({"address": address})
        on_ready(address)

    credentials = find_credentials(fill(SecurityConfig, values), node.routers)
    roles: list[NodeRole] = [PrefillRole(), DecodeRole()]
    if kind == "decode":
        roles.reverse()
    engine = fill(EngineConfig, values)
    with contextlib.closing(_telemetry(values, f"{kind}-node", node.node_id or "")) as tracer:
        asyncio.run(
            run_node(roles, engine, handoff, node, credentials, on_ready=ready, tracer=tracer)
        )


@command("prefill-node", NodeConfig, EngineConfig, HandoffConfig, SecurityConfig, TelemetryConfig)
def prefill_node(values: Values) -> None:
    """Start a prefill node: it computes the KV cache of prompts and ships it."""
    _run_node("prefill", values)


@command("decode-node", NodeConfig, EngineConfig, HandoffConfig, SecurityConfig, TelemetryConfig)
def decode_node(values: Values) -> None:
    """Start a decode node: continuous batching, fed by prefill nodes or by itself."""
    _run_node("decode", values)


@command(
    "serve", ServeConfig, EngineConfig, RouterConfig, HandoffConfig, SecurityConfig, TelemetryConfig
)
def serve(values: Values) -> None:
    """Serve MODEL: start the parts, wait until they are ready, and end them on Ctrl-C."""
    config = fill(ServeConfig, values)
    if config.pd_server and config.pd_client:
        raise UsageError("--pd-server and --pd-client are two roles; start one process for each")
    if config.pd_server:
        _refuse_unused()
        _serve_prefill(values)
    else:
        _serve_cluster(config, values)


def _refuse_unused() -> None:
    """What --pd-server does not use may come from a file or an environment that is meant for both
    sides, but not from its command line."""
    context = click.get_current_context()
    other = {item.name for config in (ServeConfig, RouterConfig) for item in fields(config)}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name in other - USED_BY_PD_SERVER:
            raise UsageError(
                f"{parameter.opts[0]} is of no use with --pd-server, which starts one prefill node "
                f"and no router; --pd-url is where it listens"
            )


def _serve_prefill(values: Values) -> None:
    """``--pd-server``: one prefill node, in this process."""
    url = values["pd_url"] or SAME_HOST
    addresses = prefill_addresses(url)
    if len(addresses) != 1:
        raise UsageError(f"--pd-url {url!r}: a prefill node listens on one address")
    host, port = addresses[0], "0"
    if not folder_of(host):
        host, _, port = host.rpartition(":")
    shared = {name: values[name] for name in ("drain_timeout", "stats_interval")}
    node = NodeConfig(host=host, port=int(port), **shared)
    with reserved_folder(host):
        _keep_prefill(values | vars(node))


def _keep_prefill(values: Values) -> None:
    """Start the node again, at its address, when it has lost its ranks."""
    from .shared.launch.cluster import Restarts

    restarts, served_at = Restarts(), ""
    while True:
        begun = inf

        def ready(address: str) -> None:
            nonlocal begun, served_at
            begun, served_at = time.monotonic(), address

        try:
            _run_node("prefill", values, ready)
            return
        except StartupError as error:
            if not served_at:
                raise
            pause = restarts.pause(time.monotonic() - begun)
            click.echo(f"tandem: {error}; {restarts.outlook(pause)}", err=True)
            if pause is None:
                raise
        if not folder_of(served_at):
            values = values | {"port": int(served_at.rpartition(":")[2])}
        time.sleep(pause)


def _serve_cluster(config: ServeConfig, values: Values) -> None:
    from .router.cluster import admin
    from .router.options import RouterOptions
    from .shared.launch.cluster import Cluster
    from .shared.security.credentials import is_loopback, read_credentials
    from .shared.security.local_token import left_token, make_token

    if config.pd_client:
        values = values | {"pd_url": values["pd_url"] or SAME_HOST}
    front = fill(RouterOptions, values)
    if values["kv_advertise"] is not None:
        raise UsageError("--kv-advertise is for one prefill node; it needs --pd-server")
    credentials = read_credentials(fill(SecurityConfig, values))
    own = not credentials.tokens and is_loopback(front.registry_host)
    if own:
        values = values | {"cluster_token": make_token()}
        credentials = read_credentials(fill(SecurityConfig, values))
    if front.prefill_addresses and not config.pd_client:
        raise UsageError("--pd-url needs --pd-client or --pd-server")
    # A script starts its background processes with SIGINT ignored; the parts would be left running.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    start_seconds = config.start_timeout or fill(EngineConfig, values).start_timeout
    cluster = Cluster(
        Path(config.log_dir),
        _plain_environment(),
        front.shutdown_delay + front.drain_timeout,
        start_seconds=start_seconds,
        tell=lambda line: click.echo(f"tandem: {line}", err=True),
    )
    with contextlib.ExitStack() as until_end:
        try:
            deadline = time.monotonic() + start_seconds
            router, address, registry = _start_router(cluster, values, credentials, deadline)
            if own:
                _leave(until_end, left_token(registry, credentials.token))
            started = _start_nodes(cluster, config, values, registry, deadline)

            def refusal() -> str:
                try:
                    return admin.refusal_of(registry, started, credentials)
                except UnavailableError:  # a machine that is busy; it is asked again
                    return ""

            _await_ready(cluster, address, min(deadline, time.monotonic() + JOIN_SECONDS), refusal)
            _introduce(front.prefill_addresses, registry, credentials)
            _greet(address, registry, config, with_key=front.asks_for_keys)
            cluster.keep(router, lambda: _is_ready(address))
        except KeyboardInterrupt:
            click.echo("stopping ...", err=True)
        finally:
            cluster.stop()


def _leave(until_end: contextlib.ExitStack, token: contextlib.AbstractContextManager[None]) -> None:
    """For this user's other commands; the cluster serves without them too."""
    try:
        until_end.enter_context(token)
    except (StartupError, OSError) as error:
        click.echo(f"tandem: other commands need --cluster-token-file: {error}", err=True)


def _start_router(
    cluster: Cluster, values: Values, credentials: Credentials, deadline: float
) -> tuple[ProcessSpec, str, str]:
    """Returns the router and its addresses, of HTTP and registry, once both listen."""
    front = fill(RouterConfig, values)
    keys = {"TANDEM_API_KEY": front.api_key} if front.api_key else {}
    locked, secret = _locked(values)
    told = to_arguments(fill(TelemetryConfig, values))
    arguments = ["router", *to_arguments(replace(front, api_key=None)), *locked, *told]
    part = cluster.start("router", arguments, **secret, **keys)
    ports = cluster.wait_ready(part, deadline)
    registry = f"{_visible(front.registry_host)}:{ports['registry']}"
    if credentials.encrypted:
        from .router.cluster import admin

        admin.list_nodes(registry, credentials)  # a certificate for other names is known at once
    return part, f"http://{_visible(front.host)}:{ports['http']}", registry


def _locked(values: Values) -> tuple[list[str], dict[str, str]]:
    """The credentials of all parts, as flags and as an environment that other users cannot see."""
    locking = fill(SecurityConfig, values)
    token = locking.cluster_token
    secret = {"TANDEM_CLUSTER_TOKEN": token} if token else {}
    return to_arguments(replace(locking, cluster_token=None)), secret


def _start_nodes(
    cluster: Cluster, config: ServeConfig, values: Values, registry: str, deadline: float
) -> set[str]:
    """Returns the nodes' addresses when every node listens."""
    from .shared.launch.gpus import engines_of, gpus_by_node, usable_gpus
    from .shared.process.cores import share_of_cores

    kinds = ["prefill-node"] * config.prefill_nodes + ["decode-node"] * config.decode_nodes
    names = [f"{kind}-{number}" for number, kind in enumerate(kinds)]
    engine, handoff = fill(EngineConfig, values), fill(HandoffConfig, values)
    # Nodes that all took every core would wait for each other's threads.
    threads = engine.threads or share_of_cores(len(kinds) * engine.world_size)
    engines = engines_of(replace(engine, threads=threads), len(kinds), usable_gpus(engine))
    for line in gpus_by_node(names, engines):
        click.echo(line, err=True)
    locked, secret = _locked(values)
    shared = [
        *to_arguments(fill(TelemetryConfig, values)),
        *locked,
        f"--join={registry}",
        f"--drain-timeout={values['drain_timeout']}",
        f"--stats-interval={values['stats_interval']}",
    ]
    parts = []
    for number, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        own = replace(handoff, kv_port=handoff.kv_port_of(number * engine.world_size))
        arguments = [kind, *shared, *to_arguments(engines[number]), *to_arguments(own)]
        parts.append(cluster.start(name, arguments, **secret))
    return {cluster.wait_ready(part, deadline).get("address", "") for part in parts}


def _plain_environment() -> dict[str, str]:
    """Ours without the options: the parts get theirs as flags, and must not read ours again."""
    options = _variables()
    return {name: value for name, value in os.environ.items() if name not in options}


def _variables() -> set[str]:
    """The environment variables of all options."""
    given = [item.envvar for made in cli.commands.values() for item in made.params]
    lists = [[names] if isinstance(names, str) else names or () for names in given]
    return {name for names in lists for name in names}


def _visible(host: str) -> str:
    """Where this machine reaches what listens on ``host``, as a URL has it."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{own}]" if ":" in own else own


def _await_ready(
    cluster: Cluster, address: str, deadline: float, refusal: Callable[[], str]
) -> None:
    """Until the router knows a decode node: nodes join a moment after they listen. Raises
    ``StartupError`` when it refuses one of ours, whose own log would say so for ever."""
    ask_at = time.monotonic() + REFUSAL_SECONDS
    while time.monotonic() < deadline:
        cluster.check()
        if _is_ready(address):
            return
        if time.monotonic() >= ask_at:
            if reason := refusal():
                raise StartupError(f"the router refuses a node: {reason}")
            ask_at = time.monotonic() + REFUSAL_SECONDS
        time.sleep(0.05)
    raise StartupError(
        f"all parts listen, but {address}/ready did not answer in time: no decode node has joined; "
        "see the nodes' logs"
    )


def _is_ready(address: str) -> bool:
    """Whether a decode node takes requests from the router at ``address``."""
    from .shared.security.credentials import open_url

    try:
        with open_url(f"{address}/ready", seconds=2):
            return True
    except OSError:  # that it is not ready is one as well
        return False


def _introduce(addresses: tuple[str, ...], registry: str, credentials: Credentials) -> None:
    """``--pd-client``: the prefill nodes that were named must be there, at least one of them."""
    from .shared.node.announce import announce_to_router

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
        click.echo(f"tandem: {problem}; it is used when it does", err=True)


@cli.group("nodes", invoke_without_command=True, params=command_options(SecurityConfig))
@click.option(
    "--router",
    "registry",
    envvar="TANDEM_ROUTER",
    help="Registry of the router, host:port (default: that of the tandem serve that you run here, "
    "else 127.0.0.1:8001).",
)
@click.option("--json", "as_json", is_flag=True, help="Every field, for programs.")
@click.pass_context
def nodes(context: click.Context, registry: str | None, as_json: bool, **values: Any) -> None:
    """List the nodes of a router with their role, state, load, links and leases."""
    from .router.cluster import admin
    from .shared.security.local_token import find_credentials, find_router

    registry = registry or find_router("127.0.0.1:8001")
    credentials = find_credentials(
        fill(SecurityConfig, values), split_addresses("--router", registry)
    )
    context.obj = registry, credentials
    if context.invoked_subcommand is None:
        listed = admin.list_nodes(registry, credentials)
        click.echo(admin.as_json(listed) if as_json else admin.as_table(listed))


@nodes.command("drain")
@click.argument("node")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    help="Seconds after which it ends although requests still run (default: no limit).",
)
@click.pass_obj
def drain_node(router: tuple[str, Credentials], node: str, timeout: float | None) -> None:
    """Have NODE take no more work, finish what it has, and end."""
    from .router.cluster import admin

    registry, credentials = router
    admin.drain_node(registry, node, credentials, timeout=timeout)
    limit = "" if timeout is None else f", after {timeout:g} s at the latest"
    click.echo(f"{node} takes no more work, and ends when it has finished what it has{limit}")


@nodes.command("role")
@click.argument("node")
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@click.option("--force", is_flag=True, help="Also when it is the last decode node.")
@click.pass_obj
def set_role(router: tuple[str, Credentials], node: str, role: str, force: bool) -> None:
    """Have NODE finish what it has, and go on as a prefill or a decode node."""
    from .router.cluster import admin

    registry, credentials = router
    admin.set_role(registry, node, role, credentials, force=force)
    click.echo(
        f"{node} takes no more work until it has finished what it has; then it is a {role} node"
    )


@cli.command("doctor", params=command_options(SecurityConfig))
@click.argument("url")
@click.option(
    "--router",
    "registry",
    envvar="TANDEM_ROUTER",
    help="Registry of the router, host:port (default: that of the tandem serve that you run here "
    "if URL is on this machine, else port 8001 of URL's host).",
)
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def doctor(url: str, registry: str | None, as_json: bool, **values: Any) -> None:
    """Ask the router at URL, its nodes and every way between them what is wrong.

    Each decode node greets each prefill node and compares a short prompt's KV with its own; when
    that fails, it tries the data ports. Exit status: 0 all well, 1 something is wrong, 2 wrong
    usage.
    """
    from .router.doctor import report
    from .router.doctor.findings import findings
    from .router.doctor.survey import survey
    from .shared.security.credentials import is_loopback
    from .shared.security.local_token import find_credentials, find_router

    if not registry:
        host = report.host_of(url)
        registry = f"{host}:8001"
        if is_loopback(host.strip("[]")):
            registry = find_router(registry)
    (registry,) = split_addresses("--router", registry)
    seen = survey(
        url.rstrip("/"), registry, find_credentials(fill(SecurityConfig, values), [registry])
    )
    found = findings(seen)
    click.echo(report.as_json(seen, found) if as_json else report.as_text(seen, found))
    if any(finding.wrong for finding in found):
        sys.exit(1)


def _greet(address: str, registry: str, config: ServeConfig, *, with_key: bool) -> None:
    click.echo(f"Tandem is ready: {address}  (chat page, and OpenAI's API under /v1)")
    body = '{"messages": [{"role": "user", "content": "Hello! Who are you?"}]}'
    key = " -H 'authorization: Bearer KEY'" if with_key else ""  # which is not for a screen
    click.echo(
        f"Try: curl {address}/v1/chat/completions{key} -H 'content-type: application/json' "
        f"-d '{body}'"
    )
    click.echo(f"Logs: {Path(config.log_dir).resolve()}. Ctrl-C ends everything.")
    click.echo(f"Parts: tandem nodes --router {registry}")
    click.echo(f"Check: tandem doctor {address} --router {registry}")
    click.echo(f"Other nodes join at {registry} (--registry-port fixes the port)")


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: errors are one line on stderr, exit code 2 for usage, 1 for failure."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own errors say it, in one line
    allow_many_files()
    try:
        cli.main(sys.argv[1:] or ["--help"], standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.UsageError, UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        _fail(message, 2)
    except click.Abort:
        _fail("interrupted", 130)
    except TandemError as error:
        _fail(str(error), 1)


def _fail(message: str, status: int) -> None:
    print("tandem: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
