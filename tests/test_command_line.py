"""The command line: its surface is frozen, its precedence fixed, its errors one line each.

``TANDEM_TEST_REFRESH=1 pytest tests/test_command_line.py`` writes the surface anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import click
import psutil
import pytest

from tandem.__main__ import cli
from tandem.commands.option_variables import environment_of_parts
from tandem.commands.part_command import join_names
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.config import EngineConfig, NodeConfig, ServeConfig
from tandem.shared.config.command_line import command_options, fill
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.launch import serve
from tandem.shared.security.local_token import left_token
from tandem.tests.end_to_end.support.cluster import running, until
from tandem.tests.support.certificates import issue

SURFACE = Path(__file__).with_name("command_line.txt")


# ---- the surface -------------------------------------------------------------------------------


def surface() -> str:
    """One line a flag: its names, its default, and what else it takes."""
    lines = []
    for name, command in sorted(cli.commands.items()):
        below = sorted(command.commands.items()) if isinstance(command, click.Group) else []
        for title, one in [(name, command), *((f"{name} {n}", c) for n, c in below)]:
            lines.append(f"tandem {title}")
            lines += sorted(f"  {_line(parameter)}" for parameter in one.params)
    return "\n".join(lines) + "\n"


def _line(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return f"[{parameter.make_metavar(click.Context(cli)).strip('[]')}]"
    names = " ".join([*parameter.opts, *parameter.secondary_opts])
    return f"{names} | {parameter.type!r} | default {_default(parameter)} | {parameter.envvar}"


def _default(parameter: click.Parameter) -> Any:
    default = parameter.to_info_dict()["default"]
    return default if isinstance(default, (bool, int, float, str)) else None


def test_the_surface_is_frozen() -> None:
    if os.environ.get("TANDEM_TEST_REFRESH"):
        SURFACE.write_text(surface())
    assert surface() == SURFACE.read_text(), "if meant: TANDEM_TEST_REFRESH=1, and a CHANGELOG line"


# ---- precedence --------------------------------------------------------------------------------


def parse(arguments: list[str]) -> dict[str, Any]:
    command = click.Command("test", params=list(command_options(NodeConfig, EngineConfig)))
    with command.make_context("test", arguments) as context:
        return context.params


@pytest.mark.parametrize(
    ("flag", "environment", "yaml", "expected"),
    [
        (True, True, True, 1001),
        (False, True, True, 1002),
        (False, False, True, 1003),
        (False, False, False, 0),
        (True, False, True, 1001),
    ],
)
def test_flag_wins_over_environment_over_yaml_over_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: bool,
    environment: bool,
    yaml: bool,
    expected: int,
) -> None:
    arguments = []
    if environment:
        monkeypatch.setenv("TANDEM_PORT", "1002")
    if yaml:
        (tmp_path / "c.yaml").write_text("port: 1003\n")
        arguments.append(f"--config={tmp_path / 'c.yaml'}")
    if flag:
        arguments.append("--port=1001")
    assert fill(NodeConfig, parse(arguments)).port == expected


def test_yaml_takes_every_name_of_an_option(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tp: 2\nmax_model_len: 99\nenable-prefix-caching: false\nm: x\n")
    config = fill(EngineConfig, parse([f"--config={file}"]))
    assert (config.tensor_parallel_size, config.max_model_len) == (2, 99)
    assert (config.enable_prefix_caching, config.model) == (False, "x")


@pytest.mark.parametrize("alias", ["--m", "--model", "--w", "--f"])
def test_aliases_of_the_model(alias: str) -> None:
    assert parse([f"{alias}=here"])["model"] == "here"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_model_length: 8", "did you mean max.model.len"),
        ("- port", "must map"),
        ("a: [", "not YAML"),
        ("port: [1]", "one value"),
        ("tp: 1\ntensor-parallel-size: 2", "twice"),
        ("swap_space: 4", "swap_space is not supported: nothing is offloaded"),
    ],
)
def test_a_wrong_yaml_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=word):
        parse([f"--config={tmp_path / 'c.yaml'}"])


# ---- errors ------------------------------------------------------------------------------------


def fail(arguments: list[str], folder: Path, status: int, *words: str, seconds: float = 45) -> None:
    """The command ends with ``status`` and one line on stderr that has ``words``; no process
    that it started outlives it."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem", *arguments],
        cwd=folder,
        env=os.environ | {"TANDEM_TEST_MARK": mark, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == status, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if " INFO tandem" not in line]
    assert line.startswith("tandem: ")
    assert [word for word in words if word not in line] == []
    assert _left_running(mark) == []


def _left_running(mark: str) -> list[str]:
    found: list[str] = []
    for _ in range(30):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TANDEM_TEST_MARK") == mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--pd-server", "--pd-client"], ["--pd-server", "--pd-client"]),
        (["serve", "--pd-server", "--pd-url", "file://run"], ["file:///folder"]),
        (["router", "--pd-url", "file:///" + "d" * 100], ["too long for Unix sockets"]),
        (["serve", "--pd-server", "--port", "9000"], ["--port", "not used with --pd-server"]),
        (["serve", "--pd-server", "--prefill-nodes", "2"], ["--prefill-nodes", "--pd-server"]),
        (["serve", "--pd-client", "--pd-url", "host"], ["--pd-url", "'host'", "host:port"]),
        (["serve", "--pd-server", "--pd-url", "host:99999"], ["host:99999"]),
        (["serve", "builtin", "--model", "builtin"], ["twice"]),
        (["serve", "--m", "a/b", "--f", "c.gguf"], ["twice", "--m, --w, --f are one option"]),
        (["serve", "--colour", "red"], ["--colour"]),
        (["decode-node", "--d", "0,1", "--tp", "3"], ["--d", "--tensor-parallel-size"]),
        (["decode-node", "--d", "a"], ["--d", "'a'"]),
        (["decode-node", "--join", "nowhere"], ["--join", "nowhere"]),
        (["decode-node", "--advertise", "here"], ["--advertise", "'here'", "host:port"]),
        (["prefill-node", "--advertise", "a:1,b:2"], ["--advertise", "one address"]),
        (["decode-node", "--port", "70000"], ["--port", "70000"]),
        (["decode-node", "--kv-cache-dtype", "fp8_e5m2"], ["'fp8_e5m2'", "'fp8_e4m3'"]),
        (["decode-node", "--config", "none.yaml"], ["none.yaml"]),
        (["decode-node", "--host", "0.0.0.0"], ["--host 0.0.0.0", "--insecure"]),
        (["prefill-node", "--kv-host", "0.0.0.0"], ["--kv-host 0.0.0.0", "--insecure"]),
        (["router", "--registry-host", "0.0.0.0"], ["--registry-host 0.0.0.0", "--tls-cert"]),
        (["router", "--tls-cert", "c.pem"], ["--tls-cert needs --tls-key"]),
        (["nodes", "--tls-ca", "ca.pem"], ["--tls-ca ca.pem needs --tls-cert"]),
        (["router", "--pd-url", "a:b"], ["--pd-url", "'a:b'"]),
        (["router", "--api-key", "secret,"], ["--api-key", "empty"]),
        (["serve", "--api-key", ""], ["--api-key", "empty"]),
        (["serve", "--port", "0", "--d", "a"], ["--d", "'a'"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    fail(arguments, tmp_path, 2, *words)


@pytest.mark.parametrize("command", [["nodes"], ["doctor", "http://127.0.0.1:1"]])
def test_a_file_may_have_any_option_of_a_command(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "c.yaml").write_text("router: nowhere\njson: true\n")
    fail([*command, "--config=c.yaml"], tmp_path, 2, "--router 'nowhere' is not host:port")
    (tmp_path / "c.yaml").write_text("config: d.yaml\n")
    fail([*command, "--config=c.yaml"], tmp_path, 2, "unknown option 'config'")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TANDEM_MAX_MODEL_LENGTH", "did you mean TANDEM_MAX_MODEL_LEN?"),
        ("TANDEM_CLUSTER_TOKN", "did you mean TANDEM_CLUSTER_TOKEN?"),
        ("TANDEM_TOKEN", "looks like a secret"),
    ],
)
def test_a_variable_that_is_misspelt_or_may_be_a_secret_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setenv("TANDEM_JOIN", "127.0.0.1:8001")  # another command's
    monkeypatch.setenv(name, "1")
    fail(["router"], tmp_path, 2, name, "of any command", words)
    monkeypatch.delenv(name)
    file = tmp_path / "tandem.yaml"
    file.write_text(f"{name.removeprefix('TANDEM_').lower()}: 1\n")
    fail(["router", "--config", str(file)], tmp_path, 2, "tandem.yaml", "of any command")


def test_names_that_another_release_or_command_may_have_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One configuration serves a router and its nodes, and a release and the one before it."""
    monkeypatch.setenv("TANDEM_SPECULATIVE_DEPTH", "3")
    file = tmp_path / "tandem.yaml"
    file.write_text("prefill-threshold: 7\nspeculative_depth: 3\nport: 8123\n")
    context = cli.make_context("tandem", ["router"])
    with pytest.raises(click.UsageError), context:
        cli.invoke(cli.make_context("tandem", ["router", "--config", str(file), "--port=x"]))
    told = capsys.readouterr().err
    assert (
        "environment: TANDEM_SPECULATIVE_DEPTH is not an option of any command and is ignored"
        in told
    )
    assert "tandem.yaml: speculative_depth is not an option of any command and is ignored" in told
    assert "prefill-threshold" not in told


def test_without_a_command_the_help_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem"], capture_output=True, text=True, timeout=45
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nServe a model:\n" in done.stdout


@pytest.mark.parametrize(
    ("variable", "arguments", "flag"),
    [
        ("TANDEM_API_KEY", ["router"], "--api-key"),
        ("VLLM_API_KEY", ["router"], "--api-key"),
        ("TANDEM_ADMIN_API_KEY", ["router"], "--admin-api-key"),
        ("TANDEM_CLUSTER_TOKEN", ["decode-node"], "--cluster-token"),
    ],
)
def test_an_empty_variable_of_a_secret_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, arguments: list[str], flag: str
) -> None:
    monkeypatch.setenv(variable, "")
    fail(arguments, tmp_path, 2, flag, "empty", "admit everybody")


def broken_model(folder: Path, **changes: Any) -> Path:
    shutil.copytree(builtin_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_model_folder_that_does_not_exist(tmp_path: Path) -> None:
    fail(["decode-node", "./none"], tmp_path, 1, "./none", "does not exist")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    folder = broken_model(tmp_path / "m", architectures=["OracleForCausalLM"], model_type="oracle")
    fail(["prefill-node", str(folder)], tmp_path, 1, "racle")


def test_truncated_weights(tmp_path: Path) -> None:
    weights = broken_model(tmp_path / "m") / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    fail(["decode-node", str(weights.parent)], tmp_path, 1, "model.safetensors")


def test_no_memory_for_the_cache(tmp_path: Path) -> None:
    blocks = str(1 << 40)
    arguments = ["decode-node", "--num-gpu-blocks-override", blocks]
    fail(arguments, tmp_path, 1, "--num-gpu-blocks-override", blocks, "use at most")


def test_no_memory_for_a_single_block(tmp_path: Path) -> None:
    fail(["decode-node", "--kv-fraction", "0"], tmp_path, 1, "one KV block", "--kv-fraction")


def test_cuda_ipc_without_a_gpu(tmp_path: Path) -> None:
    arguments = ["decode-node", "--device", "cpu", "--carrier", "cuda_ipc"]
    wanted = "--carrier cuda_ipc is not possible here: the KV cache is not on a CUDA device"
    fail(arguments, tmp_path, 1, wanted, "use --device cuda, or --carrier auto")


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = broken_model(tmp_path / "m", vocab_size=512)
    arguments = ["serve", str(folder), "--load-format", "dummy", "--port", "0"]
    fail(arguments, tmp_path, 1, "tokenizer.json has 2048 tokens", "vocab_size is 512")


def test_a_prefill_node_of_another_model_is_refused_by_field_and_values(tmp_path: Path) -> None:
    folder = broken_model(
        tmp_path / "m", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}
    )
    with running(tmp_path, str(folder)) as cluster:
        cluster.start(["serve", str(folder), "--pd-server", "--pd-url=127.0.0.1:0"])
        address = cluster.parts[0].details["address"]
        client = ["serve", "--pd-client", "--pd-url", address, "--port", "0"]
        fail(client, tmp_path, 1, address, "rope_theta", "'100000.0'", "'5000.0'")


def test_a_prefill_node_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        client = ["serve", "--pd-client", "--pd-url", address, "--port", "0"]
        fail(client, tmp_path, 1, "--pd-url", address, "--pd-server")


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
    serve.start_router(started, values, 0.0)
    (arguments,), (environment,) = started.arguments, started.environments
    assert set(limited) <= set(arguments) and "secret" not in " ".join(arguments)
    assert environment["TANDEM_API_KEY"] == "secret"
    assert environment["TANDEM_ADMIN_API_KEY"] == "secret-2"


def test_the_launchers_lock_reaches_every_part_and_its_token_no_argument() -> None:
    flags = ["--cluster-token=secret", "--tls-cert=c.pem", "--tls-key=k.pem", "--prefill-nodes=1"]
    values = cli.commands["serve"].make_context("serve", flags).params
    started: Any = Started()
    serve.start_router(started, values, 0.0)
    serve.start_nodes(started, fill(ServeConfig, values), values, "127.0.0.1:2")
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
    _, registry = serve.start_router(started, values, 0.0)
    serve.start_nodes(started, fill(ServeConfig, values), values, registry)
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
    made = MagicMock()
    made.return_value.wait_starting.side_effect = StartupError("enough is known")
    monkeypatch.setattr(serve, "Cluster", made)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve.time, "monotonic", lambda: 100.0)
    values = cli.commands["serve"].make_context("serve", flags).params
    with pytest.raises(StartupError, match="enough is known"):
        serve.serve_cluster(fill(ServeConfig, values), values, {}, MagicMock())
    (_, deadline) = made.return_value.wait_starting.call_args.args
    assert deadline == 100.0 + seconds
    assert made.call_args.kwargs["start_seconds"] == seconds
    config = fill(EngineConfig, values)
    assert config.start_timeout > 3 * config.load_timeout


def test_serve_ends_when_its_router_refuses_one_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "is_ready", lambda address: False)
    monkeypatch.setattr(serve, "REFUSAL_SECONDS", 0.0)
    answers = iter(["", "two nodes are called 'd'"])
    cluster: Any = MagicMock()
    with pytest.raises(StartupError, match="the router rejects a node: two nodes are called 'd'"):
        serve.await_ready(cluster, "http://h:1", time.monotonic() + 60, lambda: next(answers))
    assert cluster.check.call_count == 2


def test_a_cluster_whose_token_cannot_be_left_for_others_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with contextlib.ExitStack() as stack:
        serve.publish_token(stack, left_token("127.0.0.1:8001", "t", "http://h:1"))
    told = capsys.readouterr().err
    assert "other commands need --cluster-token-file" in told and "XDG_RUNTIME_DIR" in told


@pytest.mark.parametrize(("gpus", "devices"), [(0, (None, None)), (1, ("0", "0")), (2, ("0", "1"))])
def test_serve_gives_each_node_its_gpu_and_the_number_that_share_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    devices: tuple[str | None, ...],
) -> None:
    monkeypatch.setattr("tandem.shared.launch.gpus.device_count", lambda: gpus)
    monkeypatch.setattr("tandem.shared.launch.gpus._torch_has_cuda", lambda: True)
    values = cli.commands["serve"].make_context("serve", ["--prefill-nodes=1"]).params
    started: Any = Started()
    serve.start_nodes(started, fill(ServeConfig, values), values, "r:1")
    nodes = [fill(EngineConfig, parse_node(arguments)) for arguments in started.arguments]
    assert tuple(node.devices for node in nodes) == devices
    assert {node.nodes_per_device for node in nodes} == {1 if gpus == 2 else 2}
    assert ("decode-node-1: GPU" in capsys.readouterr().err) == (gpus > 0)


def parse_node(arguments: list[str]) -> dict[str, Any]:
    return cli.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params


@pytest.mark.parametrize("with_key", [True, False])
def test_the_greetings_curl_line_asks_for_a_key_where_one_is_needed(
    capsys: pytest.CaptureFixture[str], with_key: bool
) -> None:
    serve.greet("http://127.0.0.1:1", "127.0.0.1:2", ServeConfig(), with_key=with_key)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "curl" in line]
    assert ("-H 'authorization: Bearer KEY'" in line) == with_key
    assert shlex.split(line)[-1].startswith('{"messages"')


def test_a_certificate_for_other_names_is_known_at_once(tmp_path: Path) -> None:
    flags = issue(tmp_path / "papers", "tandem.internal").flags
    fail(["serve", "--port", "0", *flags], tmp_path, 1, "127.0.0.1", "--tls-name")


def test_sigterm_ends_a_node_while_it_loads(tmp_path: Path) -> None:
    with running(tmp_path, "builtin") as cluster:
        node = cluster.launch(["decode-node"])
        head = psutil.Process(node.process.pid)
        until(lambda: bool(head.children()), "the rank to be started")
        (rank,) = head.children()
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(30) == 0, node.log.read_text()
        assert not rank.is_running()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        fail(["decode-node", "--port", port], tmp_path, 1, port)
        fail(["prefill-node", "--kv-port", port], tmp_path, 1, port, "KV", "--kv-port")
        fail(["serve", "--port", port], tmp_path, 1, port)


def test_an_advertised_place_that_cannot_be(tmp_path: Path) -> None:
    fail(["prefill-node", "--kv-advertise", "here"], tmp_path, 2, "--kv-advertise", "host:port")
    fail(["serve", "--kv-advertise", "a:8200"], tmp_path, 2, "--kv-advertise", "--pd-server")


def test_serve_shows_the_error_of_a_part_that_cannot_start(tmp_path: Path) -> None:
    fail(["serve", "./none"], tmp_path, 1, "ended with exit status 1", "./none", "does not exist")


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        ("M --served-model-name A B --port 1", "M --served-model-name A,B --port 1"),
        ("M --served-model-name A", "M --served-model-name A"),
        ("M --served-model-name --port 1", "M --served-model-name --port 1"),
        ("--served-model-name A M", "--served-model-name A M"),
    ],
)
def test_words_after_a_served_name_are_aliases_once_the_model_is_known(
    given: str, joined: str
) -> None:
    assert join_names(given.split()) == joined.split()
