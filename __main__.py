"""The ``tandem`` command. It starts all parts, and imports each only when it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .bench.command_group import bench
from .commands.completion import PROGRAM, completion
from .commands.failures import exit_with
from .commands.help_page import HelpfulCommand, HelpfulGroup
from .commands.implied import with_command
from .commands.part_command import (
    Values,
    environment_of_parts,
    has_model,
    on_command_line,
    option_variables,
    part_command,
)
from .commands.pd_server_options import reject_unused
from .shared.config import (
    EngineConfig,
    HandoffConfig,
    HostsConfig,
    NodeConfig,
    RouterConfig,
    SecurityConfig,
    ServeConfig,
    TelemetryConfig,
)
from .shared.config.client import (
    ChatConfig,
    CompleteConfig,
    ConnectionConfig,
    RequestConfig,
    RunBatchConfig,
)
from .shared.config.command_line import NumberRange, check_variable, command_options, fill
from .shared.errors import UsageError
from .shared.process.garbage import lasting_imports
from .shared.process.init import run_under_init
from .shared.process.open_files import allow_many_files

if TYPE_CHECKING:
    from .client.openai_server import OpenAIServer
    from .router.server import Router
    from .shared.node.role_switch import NodeRole
    from .shared.security.credentials import Credentials
    from .shared.telemetry.tracing import Tracer

# Finds the registry for an operator's command, and the credentials for it.
FindRegistry = Callable[[], "tuple[str, Credentials]"]

SECTIONS = {
    "Serve a model": ("serve", "router", "prefill-node", "decode-node"),
    "Use one": ("chat", "complete", "run-batch"),
    "Models on this machine": ("pull", "list", "info"),
    "Look after a cluster": ("nodes", "doctor"),
    "Other commands": ("bench", "completion"),
}


@click.group(
    cls=HelpfulGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 90},
)
@click.version_option(__version__, "-V", "--version", prog_name=PROGRAM)
def cli() -> None:
    """Serve large language models with prefill and decode apart.

    \b
    tandem serve builtin   serves the built-in model, with a page for browsers, at
                           http://127.0.0.1:8000
    tandem chat builtin    chats with it on this terminal
    tandem serve --help    shows the options of a command; without a command,
                           options are those of serve
    """
    from .shared.process.lifeline import LIFELINE_FD, READY_FD, ROUTER_NUMBER

    names = {*option_variables(cli), LIFELINE_FD, READY_FD, ROUTER_NUMBER}
    for name in sorted(os.environ):
        if name.startswith("TANDEM_") and not name.startswith("TANDEM_TEST_") and name not in names:
            check_variable(name, names)


def command(name: str, *configs: type, **settings: Any) -> Callable[[Any], click.Command]:
    """A subcommand of ``tandem`` whose options are the fields of ``configs``; ``settings`` are
    passed to ``part_command``."""

    def wrap(function: Callable[[Values], None]) -> click.Command:
        subcommand = part_command(name, function, *configs, **settings)
        cli.add_command(subcommand)
        return subcommand

    return wrap


def _telemetry(values: Values, role: str, node_id: str) -> Tracer:
    """Configure logging; returns the tracer, which the caller closes."""
    from .shared.process.queued_stderr import queue_stderr
    from .shared.telemetry.logs import LogSettings, setup_logging
    from .shared.telemetry.start_tracer import start_tracer

    config = fill(TelemetryConfig, values)
    queue_stderr()
    setup_logging(
        LogSettings(form=config.log_format, level=config.log_level, role=role, node_id=node_id)
    )
    return start_tracer(config.otlp_endpoint, role, node_id)


@command("router", RouterConfig, SecurityConfig, TelemetryConfig, model=False)
def router(values: Values) -> None:
    """Start a router: HTTP in, tokens out. It serves the model of the nodes that join, which must
    be that of --model if it is set."""
    from .shared.process.lifeline import ROUTER_NUMBER

    number = os.environ.pop(ROUTER_NUMBER, None)
    if number is None and fill(RouterConfig, values).router_workers > 1:
        _launch_routers(values)
        return
    with lasting_imports():
        from .router.options import RouterOptions
        from .router.registry_server import RegistryServer
        from .shared.process.lifeline import announce_ready, announce_start, end_with_launcher
        from .shared.process.signals import catch_signals
        from .shared.security.credentials import read_credentials

    credentials = read_credentials(fill(SecurityConfig, values))

    def ready(router: Router) -> None:
        end_with_launcher()
        ports = {"http": router.http_port, "registry": router.registry_port}
        announce_ready(ports | ({"metrics": router.metrics_port} if router.metrics_port else {}))

    async def serve() -> None:
        stop = asyncio.Event()
        catch_signals(stop.set)
        options = fill(RouterOptions, values)
        registry = RegistryServer(options, credentials)
        announce_start({"registry": registry.bind()})
        with lasting_imports():  # most of a router's modules, while its nodes load
            from .router.server import run_router

        await run_router(options, stop, ready, tracer, credentials, registry)

    name = f"router-{socket.gethostname()}" + (f"-{number}" if number else "")
    with contextlib.closing(_telemetry(values, "router", name)) as tracer:
        asyncio.run(serve())


def _launch_routers(values: Values) -> None:
    """Start several router processes on one port."""
    from .shared.launch.routers import serve_routers
    from .shared.telemetry.logs import logger

    with contextlib.closing(_telemetry(values, "router", f"router-{socket.gethostname()}")):
        serve_routers(values, environment_of_parts(cli), logger("router").warning)


def _run_node(
    kind: str, values: Values, on_ready: Callable[[str], None] = lambda address: None
) -> None:
    """Run a node that starts as a prefill or a decode node and may switch roles, or with a
    ``--node-rank`` above 0 this host's part of its ranks."""
    engine = fill(EngineConfig, values)
    if engine.node_rank:
        _run_headless(f"{kind}-node", values)
        return
    with lasting_imports():
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
    with contextlib.closing(_telemetry(values, f"{kind}-node", node.node_id or "")) as tracer:
        asyncio.run(
            run_node(roles, engine, handoff, node, credentials, on_ready=ready, tracer=tracer)
        )


def _run_headless(role: str, values: Values) -> None:
    """Run the ranks of this host, of a node whose head is on another one."""
    from .shared.node.other_hosts import run_headless
    from .shared.process.lifeline import announce_ready, end_with_launcher
    from .shared.security.credentials import read_credentials

    def ready() -> None:
        end_with_launcher()
        announce_ready({"node_rank": engine.node_rank})

    engine, handoff = fill(EngineConfig, values), fill(HandoffConfig, values)
    credentials = read_credentials(fill(SecurityConfig, values))
    node = fill(NodeConfig, values) if "health_port" in values else None  # not of serve
    name = f"{role}-{socket.gethostname()}-rank-{engine.node_rank}"
    with contextlib.closing(_telemetry(values, role, name)):
        asyncio.run(run_headless(engine, handoff, credentials, node, ready))


@command("prefill-node", NodeConfig, EngineConfig, HandoffConfig, SecurityConfig, TelemetryConfig)
def prefill_node(values: Values) -> None:
    """Start a prefill node, which computes the KV cache of prompts for decode nodes."""
    _run_node("prefill", values)


@command("decode-node", NodeConfig, EngineConfig, HandoffConfig, SecurityConfig, TelemetryConfig)
def decode_node(values: Values) -> None:
    """Start a decode node, which generates tokens, with prefill on prefill nodes or its own."""
    _run_node("decode", values)


@command(
    "serve", ServeConfig, EngineConfig, RouterConfig, HandoffConfig, SecurityConfig, TelemetryConfig
)
def serve(values: Values) -> None:
    """Serve MODEL: start the parts, wait until they are ready, and end them on Ctrl-C."""
    config = fill(ServeConfig, values)
    if config.pd_server and config.pd_client:
        raise UsageError("--pd-server and --pd-client are two roles; start one process for each")
    engine = fill(EngineConfig, values)
    if engine.several_hosts and config.decode_nodes + config.prefill_nodes > 1:
        raise UsageError(
            f"--nnodes {engine.nnodes} divides one node, but --decode-nodes and --prefill-nodes "
            f"are several; start each with tandem decode-node or prefill-node, which join a router"
        )
    if config.pd_server:
        _limit_own_ranks(config, engine)
    if engine.node_rank:
        _run_headless("prefill-node" if config.pd_server else "decode-node", values)
        return
    if config.pd_server:
        from .shared.launch.pd_server import serve_prefill

        reject_unused()
        serve_prefill(values, lambda values, ready: _run_node("prefill", values, ready))
        return
    if config.interactive or config.prompts is not None:
        _talk_to_own(config, values)
        return
    from .router.cluster import admin
    from .shared.launch.serve import RegistryClient, serve_cluster
    from .shared.process.queued_stderr import queue_stderr

    queue_stderr()
    registry = RegistryClient(
        check=admin.list_nodes, refusal_of=admin.refusal_of, can_serve=admin.can_serve
    )
    serve_cluster(config, values, environment_of_parts(cli), registry)


def _limit_own_ranks(config: ServeConfig, engine: EngineConfig) -> None:
    """Limit the ranks of this prefill node, which inherit this process's environment."""
    from .shared.launch.mps import limit_of_prefill

    shares = engine.device != "cpu" and (engine.nodes_per_device or 1) > 1
    os.environ.update(limit_of_prefill(config.prefill_gpu_share, shares=shares))


def _talk_to_own(config: ServeConfig, values: Values) -> None:
    """Start a cluster for a chat, or for completions of ``--prompts``."""
    from .client.chat_commands import run_chat
    from .client.complete import run_complete
    from .shared.launch.temporary import for_own_use, mcp_labels

    values, connection = for_own_use(values, fixed_port=on_command_line("port"))

    def use(server: OpenAIServer) -> None:
        if config.prompts is None:
            run_chat(server, ChatConfig(mcp=mcp_labels(values)), RequestConfig())
        else:
            run_complete(server, CompleteConfig(prompts=config.prompts, chat=True), RequestConfig())

    _serve_while(values, connection, use)


@command("chat", ConnectionConfig, RequestConfig, ChatConfig, EngineConfig, without=HostsConfig)
def chat(values: Values) -> None:
    """Chat on the terminal with the server at --url, or with MODEL, which this command then serves.

    \b
    tandem chat                    with the server on this machine; /help lists
                                   the commands of the chat
    tandem chat smollm2            with a model
    tandem chat -q "Who are you?"  one message; prints only the reply
    """
    from .client.chat_commands import run_chat

    config, request = fill(ChatConfig, values), fill(RequestConfig, values)
    _with_server(values, lambda server: run_chat(server, config, request))


@command(
    "complete", ConnectionConfig, RequestConfig, CompleteConfig, EngineConfig, without=HostsConfig
)
def complete(values: Values) -> None:
    """Complete prompts with the server at --url, or with MODEL, which this command then serves.

    \b
    tandem complete --chat --prompts "What is 7 plus 5? | Who are you?"
                                            replies to two messages
    tandem complete < prompt.txt            completes the standard input
    tandem complete --input a.jsonl --json  completes each line of a file
    """
    from .client.complete import run_complete

    config, request = fill(CompleteConfig, values), fill(RequestConfig, values)
    _with_server(values, lambda server: run_complete(server, config, request))


@command("run-batch", RunBatchConfig, ConnectionConfig, EngineConfig, without=HostsConfig)
def run_batch(values: Values) -> None:
    """Run the requests of a JSONL file on the server at --url, or on MODEL, which this command then
    serves. If it is interrupted, run it again to continue.

    Each line is a request in the format of OpenAI's batches:

    \b
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "Hi"}]}}
    """
    from .client.batch.run import run_batch as run

    config = fill(RunBatchConfig, values)
    _ = config.files  # reports a missing option before anything starts
    _with_server(values, lambda server: run(server, config))


def _with_server(values: Values, use: Callable[[OpenAIServer], None]) -> None:
    """Run ``use`` with the server at ``--url``, or with a cluster if the options have a model."""
    from .client.openai_server import OpenAIServer
    from .shared.launch.temporary import log_folder, of_engine

    connection = fill(ConnectionConfig, values)
    if not has_model():
        with contextlib.closing(OpenAIServer(connection)) as server:
            use(server)
        return
    if on_command_line("url"):
        raise UsageError("--url and a model are two servers; give one of them")
    with log_folder() as folder:
        _serve_while(of_engine(fill(EngineConfig, values | {"seed": 0}), folder), connection, use)


def _serve_while(
    values: Values, connection: ConnectionConfig, use: Callable[[OpenAIServer], None]
) -> None:
    """Run ``use`` with a cluster that is started for it."""
    from .client.openai_server import OpenAIServer
    from .router.cluster import admin
    from .shared.launch.serve import RegistryClient, serve_cluster
    from .shared.launch.temporary import end_on_signals

    done = False

    def talk(address: str) -> None:
        nonlocal done
        end_on_signals()
        with contextlib.closing(OpenAIServer(replace(connection, url=address))) as server:
            use(server)
        done = True

    click.echo(f"starting {values['model']} ...", err=True)
    registry = RegistryClient(
        check=admin.list_nodes, refusal_of=admin.refusal_of, can_serve=admin.can_serve
    )
    serve_cluster(fill(ServeConfig, values), values, environment_of_parts(cli), registry, talk)
    if not done:
        raise KeyboardInterrupt  # which the launcher has caught


AS_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print every field as JSON.")


@command("pull", EngineConfig, only=("model", "ignore_config_keys", "hf_overrides"))
def pull(values: Values) -> None:
    """Download MODEL if it can be served and is not on this machine yet, and print its path.

    \b
    tandem pull Qwen/Qwen3-0.6B            safetensors
    tandem pull Qwen/Qwen3-0.6B@main       a branch, a tag or a commit
    tandem pull Qwen/Qwen3-8B-GGUF:Q4_K_M  a GGUF file by its quantisation
    tandem pull REPOSITORY --f FILE.gguf   or by its name
    """
    from .inventory.pull import pull as download

    if not has_model():
        raise UsageError("pull needs the MODEL to download, such as Qwen/Qwen3-0.6B")
    click.echo(download(fill(EngineConfig, values)))


@cli.command("list", cls=HelpfulCommand, params=[AS_JSON])
def list_models(as_json: bool) -> None:
    """List the downloaded models, the last used first."""
    from .inventory import cached_models

    models = cached_models.cached_models()
    click.echo(cached_models.as_json(models) if as_json else cached_models.as_table(models))


@command(
    "info",
    EngineConfig,
    only=(
        "model",
        "dtype",
        "isq",
        "kv_cache_dtype",
        "device",
        "max_model_len",
        "ignore_config_keys",
        "hf_overrides",
        "cpu_kernels",
        "decode_kernel",
    ),
    others=[AS_JSON],
)
def info(values: Values) -> None:
    """Describe MODEL, the memory that it needs, and whether it fits here; without MODEL, describe
    this machine. For a model on a hub, only configuration and headers are downloaded."""
    from .inventory import machine, model_report

    config = fill(EngineConfig, values)
    here = machine.this_machine(config)
    if not has_model():
        click.echo(json.dumps(here.about, indent=2) if values["as_json"] else machine.as_text(here))
        return
    report = model_report.describe_model(config, here)
    text = model_report.as_json(report, here) if values["as_json"] else "\n".join(report.lines)
    click.echo(text)


@cli.group("nodes", invoke_without_command=True, params=command_options(SecurityConfig))
@click.option(
    "--router",
    "registry",
    envvar="TANDEM_ROUTER",
    help="Registry of the router, host:port (default: that of your tandem serve on this machine, "
    "or else 127.0.0.1:8001).",
)
@click.option("--json", "as_json", is_flag=True, help="Print every field as JSON.")
@click.pass_context
def nodes(context: click.Context, /, registry: str | None, as_json: bool, **values: Any) -> None:
    """List the nodes of a router with role, state, load, links and leases, and the nodes lost or
    refused in the last ten minutes."""
    from .router.cluster import admin
    from .shared.security.local_token import find_registry

    security = fill(SecurityConfig, values)
    # Called by a subcommand once its own options are valid.
    context.obj = partial(find_registry, security, registry, "127.0.0.1:8001")
    if context.invoked_subcommand is None:
        listed = admin.list_nodes(*context.obj())
        click.echo(admin.as_json(listed) if as_json else admin.as_table(listed))


@nodes.command("drain")
@click.argument("node")
@click.option(
    "--timeout",
    type=NumberRange(min=0),
    help="End after this many seconds, even if requests still run (default: no limit).",
)
@click.pass_obj
def drain_node(find: FindRegistry, node: str, timeout: float | None) -> None:
    """Drain NODE: it accepts no more requests, finishes the running ones, and ends."""
    from .router.cluster import admin

    registry, credentials = find()
    admin.drain_node(registry, node, credentials, timeout=timeout)
    limit = "" if timeout is None else f", or after {timeout:g} s"
    click.echo(f"{node} accepts no more requests, and ends after the running ones{limit}")


@nodes.command("role")
@click.argument("node")
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@click.option("--force", is_flag=True, help="Switch even the last decode node.")
@click.pass_obj
def set_role(find: FindRegistry, node: str, role: str, force: bool) -> None:
    """Switch NODE to another role after its running requests."""
    from .router.cluster import admin

    registry, credentials = find()
    admin.set_role(registry, node, role, credentials, force=force)
    click.echo(f"{node} finishes its running requests, then becomes a {role} node")


@cli.command("doctor", cls=HelpfulCommand, params=command_options(SecurityConfig))
@click.argument("url")
@click.option(
    "--router",
    "registry",
    envvar="TANDEM_ROUTER",
    help="Registry of the router, host:port (default: that of your tandem serve at URL, or of your "
    "only one if URL is on this machine; or else port 8001 of URL's host).",
)
@click.option("--json", "as_json", is_flag=True, help="Print every field as JSON.")
def doctor(url: str, registry: str | None, as_json: bool, **values: Any) -> None:
    """Examine the router at URL, its nodes and the links between them.

    Each decode node greets each prefill node and compares a short prompt's KV with its own; if
    that fails, it tries the data ports. Exit status: 0 if no problem is found, 1 if there is one,
    2 for wrong usage.
    """
    from .router.doctor import report
    from .router.doctor.findings import findings
    from .router.doctor.survey import survey
    from .shared.security.local_token import find_registry

    fallback = f"{report.host_of(url)}:8001"
    registry, credentials = find_registry(fill(SecurityConfig, values), registry, fallback, url)
    state = survey(url.rstrip("/"), registry, credentials)
    results = findings(state)
    click.echo(report.as_json(state, results) if as_json else report.as_text(state, results))
    if any(finding.wrong for finding in results):
        sys.exit(1)


cli.add_command(bench)
cli.add_command(completion)


def main() -> None:
    """Entry point. Without a command, options are those of ``tandem serve``, as in vLLM.rs."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own errors are shorter
    run_under_init()
    allow_many_files()
    arguments = sys.argv[1:] or ["--help"]
    try:
        cli.main(with_command(cli, arguments), prog_name=PROGRAM, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        exit_with(error, arguments)


if __name__ == "__main__":
    main()
