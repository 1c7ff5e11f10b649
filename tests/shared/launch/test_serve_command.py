"""``tandem serve``: the options of its parts, and its waits for them."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from tandem.__main__ import cli
from tandem.commands.part_command import environment_of_parts
from tandem.shared.config import EngineConfig, RouterConfig, ServeConfig
from tandem.shared.config.command_line import fill
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.launch import serve
from tandem.shared.launch.mps import LIMIT
from tandem.shared.launch.routers import Routers
from tandem.shared.security.local_token import token_file


def test_the_parts_do_not_read_the_launchers_environment_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TANDEM_CONFIG", "TANDEM_HOST", "TANDEM_API_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("TANDEM_TEST_MARK", "kept")
    inherited = environment_of_parts(cli)
    assert [n for n in inherited if n.startswith("TANDEM_")] == ["TANDEM_TEST_MARK"]
    assert inherited["PATH"] == os.environ["PATH"]


class Started:
    """A stand-in for a launched cluster, which starts nothing."""

    def __init__(self) -> None:
        self.arguments: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    def start(self, name: str, arguments: list[str], **environment: str) -> None:
        self.arguments.append(arguments)
        self.environments.append(environment)

    def wait_starting(self, part: None, deadline: float) -> dict[str, int]:
        return {"registry": 2}


def test_keys_reach_the_router_and_no_argument() -> None:
    limited = ["--requests-per-minute=5", "--tokens-per-minute=6", "--allowed-origins=*"]
    flags = ["--api-key=secret", "--admin-api-key=secret-2", *limited]
    values = cli.commands["serve"].make_context("serve", flags).params
    started: Any = Started()
    Routers(started, values).start(0.0)
    (arguments,), (environment,) = started.arguments, started.environments
    assert set(limited) <= set(arguments) and "secret" not in " ".join(arguments)
    assert environment["TANDEM_API_KEY"] == "secret"
    assert environment["TANDEM_ADMIN_API_KEY"] == "secret-2"


def test_the_launchers_lock_reaches_every_part_and_its_token_no_argument() -> None:
    flags = ["--cluster-token=secret", "--tls-cert=c.pem", "--tls-key=k.pem", "--prefill-nodes=1"]
    values = cli.commands["serve"].make_context("serve", flags).params
    started: Any = Started()
    Routers(started, values).start(0.0)
    serve.start_nodes(started, fill(ServeConfig, values), values, ["127.0.0.1:2"])
    assert [arguments[0] for arguments in started.arguments] == [
        "router",
        "prefill-node",
        "decode-node",
    ]
    for arguments, environment in zip(started.arguments, started.environments, strict=True):
        assert {"--tls-cert=c.pem", "--tls-key=k.pem"} <= set(arguments)
        assert not [argument for argument in arguments if "secret" in argument]
        assert environment == {"TANDEM_CLUSTER_TOKEN": "secret"}


def test_the_registry_of_serve_is_where_it_was_asked_to_be() -> None:
    flags = ["--registry-host=10.0.0.1", "--registry-port=8123", "--insecure"]
    values = cli.commands["serve"].make_context("serve", flags).params
    started: Any = Started()
    routers = Routers(started, values)
    routers.start(0.0)
    (registry,) = routers.registries
    serve.start_nodes(started, fill(ServeConfig, values), values, [registry])
    router, node = started.arguments
    assert {"--registry-host=10.0.0.1", "--registry-port=8123"} <= set(router)
    assert registry == "10.0.0.1:2" and f"--join={registry}" in node


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ([], 3600 + 3 * 1800),
        (["--load-timeout=7200"], 3600 + 3 * 7200),
        (["--load-timeout=7200", "--start-timeout=5"], 5),
    ],
)
def test_serve_waits_for_a_load_as_long_as_the_node_does(
    flags: list[str], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_class = MagicMock()
    cluster_class.return_value.wait_starting.side_effect = StartupError("enough is known")
    monkeypatch.setattr(serve, "LocalCluster", cluster_class)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve.time, "monotonic", lambda: 100.0)
    values = cli.commands["serve"].make_context("serve", flags).params
    with pytest.raises(StartupError, match="enough is known"):
        serve.serve_cluster(fill(ServeConfig, values), values, {}, MagicMock())
    (_, deadline) = cluster_class.return_value.wait_starting.call_args.args
    assert deadline == 100.0 + seconds
    assert cluster_class.call_args.kwargs["start_seconds"] == seconds
    config = fill(EngineConfig, values)
    assert config.start_timeout > 3 * config.load_timeout


def test_a_download_that_is_interrupted_ends_serve_and_leaves_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "obtain_model", MagicMock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    flags = [f"--log-dir={tmp_path / 'logs'}"]
    values = cli.commands["serve"].make_context("serve", flags).params
    serve.serve_cluster(fill(ServeConfig, values), values, {}, MagicMock())
    assert capsys.readouterr().err.endswith("stopping ...\n")
    assert list(tmp_path.iterdir()) == []


def test_serve_ends_when_its_router_refuses_one_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "is_ready", lambda address: False)
    monkeypatch.setattr(serve, "REFUSAL_SECONDS", 0.0)
    reasons = iter(["", "two nodes are called 'd'"])
    cluster: Any = MagicMock()
    with pytest.raises(StartupError, match="the router rejects a node: two nodes are called 'd'"):
        serve.await_ready(
            cluster,
            "http://h:1",
            time.monotonic() + 60,
            refusal=lambda: next(reasons),
            all_serve=lambda: True,
        )
    assert cluster.check.call_count == 2


def test_a_cluster_whose_token_cannot_be_left_for_others_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with contextlib.ExitStack() as stack:
        serve.publish_token(stack, token_file("127.0.0.1:8001", "t", "http://h:1"))
    stderr = capsys.readouterr().err
    assert "other commands need --cluster-token-file" in stderr and "XDG_RUNTIME_DIR" in stderr


@pytest.mark.parametrize(("gpus", "devices"), [(0, (None, None)), (1, ("0", "0")), (2, ("0", "1"))])
def test_serve_gives_each_node_its_gpu_and_the_number_that_share_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    devices: tuple[str | None, ...],
) -> None:
    monkeypatch.setattr("tandem.shared.launch.gpus.device_count", lambda: gpus)
    monkeypatch.setattr("tandem.shared.launch.gpus._problem", lambda: None)
    flags = ["--prefill-nodes=1", "--share-devices"]
    values = cli.commands["serve"].make_context("serve", flags).params
    started: Any = Started()
    serve.start_nodes(started, fill(ServeConfig, values), values, ["r:1"])
    nodes = [fill(EngineConfig, parse_node(arguments)) for arguments in started.arguments]
    assert tuple(node.devices for node in nodes) == devices
    assert {node.nodes_per_device for node in nodes} == {1 if gpus == 2 else 2}
    assert ("decode-node-1: GPU" in capsys.readouterr().err) == (gpus > 0)


@pytest.mark.usefixtures("mps")
def test_only_prefill_nodes_that_share_a_gpu_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.shared.launch.gpus.device_count", lambda: 2)
    monkeypatch.setattr("tandem.shared.launch.gpus._problem", lambda: None)
    flags = ["--prefill-nodes=2", "--share-devices", "--prefill-gpu-share=40"]
    values = cli.commands["serve"].make_context("serve", flags).params
    started: Any = Started()
    serve.start_nodes(started, fill(ServeConfig, values), values, ["r:1"])
    assert [each.get(LIMIT) for each in started.environments] == ["40", None, None]


@pytest.mark.usefixtures("mps")
def test_a_limit_of_prefill_nodes_that_share_nothing_is_refused() -> None:
    for flags in (["--prefill-nodes=1", "--device=cpu"], []):
        flags = [*flags, "--prefill-gpu-share=40"]
        values = cli.commands["serve"].make_context("serve", flags).params
        started: Any = Started()
        with pytest.raises(UsageError, match="--prefill-gpu-share 40 is for prefill nodes that"):
            serve.start_nodes(started, fill(ServeConfig, values), values, ["r:1"])
        assert not started.arguments
    values = cli.commands["serve"].make_context("serve", [*flags, "--pd-client"]).params
    serve.start_nodes(started, fill(ServeConfig, values), values, ["r:1"])
    assert LIMIT not in started.environments[0]  # but those of another command


def parse_node(arguments: list[str]) -> dict[str, Any]:
    return cli.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params


@pytest.mark.parametrize(
    ("requests", "flags", "line"),
    [
        (0, [], "stopping ..."),
        (1, [], "stopping: waiting up to 30 s for 1 response to finish; press Ctrl-C again to "),
        (2, ["--drain-timeout=1.5", "--shutdown-delay=4"], "up to 5.5 s for 2 responses to finish"),
        (None, [], "stopping: waiting up to 30 s for running responses to"),
        (None, ["--drain-timeout=0"], "stopping ..."),
    ],
)
def test_stopping_reports_what_it_waits_for(
    requests: int | None, flags: list[str], line: str
) -> None:
    values = cli.commands["serve"].make_context("serve", flags).params
    assert line in serve.stopping(requests, fill(RouterConfig, values))


class MetricsPage(http.server.BaseHTTPRequestHandler):
    page: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.page and self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("page", "requests"),
    [
        (b"", None),
        (b'# HELP vllm:num_requests_running Requests.\nvllm:prompt_tokens_total{a="b"} 7.0\n', 0),
        (
            b'vllm:num_requests_running{model_name="a"} 2.0\n'
            b'vllm:num_requests_waiting{model_name="a"} 1.0\n'
            b'vllm:num_requests_waiting_by_reason{model_name="a"} 9.0\n',
            3,
        ),
    ],
)
def test_requests_in_progress_are_counted_where_the_router_shows_them(
    page: bytes, requests: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricsPage, "page", page)
    with http.server.HTTPServer(("127.0.0.1", 0), MetricsPage) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        assert serve.requests_at(f"http://127.0.0.1:{server.server_port}") == requests
        serving.join()
    assert serve.requests_at(f"http://127.0.0.1:{server.server_port}") is None
