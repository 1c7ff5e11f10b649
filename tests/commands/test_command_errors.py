"""Errors of commands: one line each, a status, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.shared.builtin_model import builtin_model_path
from tandem.tests.end_to_end.support.cluster import TestCluster, running, until
from tandem.tests.support import fake_hub
from tandem.tests.support.certificates import issue
from tandem.tests.support.fake_hub import FakeHub
from tandem.tests.support.forked import session_forker


def fail(
    arguments: list[str],
    folder: Path,
    status: int,
    *words: str,
    seconds: float = 45,
    prelude: str = "",
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a command, and check that it ends with ``status`` and one line on stderr with ``words``,
    and leaves no process behind. ``prelude`` runs first; ``environment`` is added."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | dict(variables or {})
    with open(os.devnull, "w") as null, tempfile.TemporaryFile("w+") as errors:
        descriptors = null.fileno(), errors.fileno(), null.fileno()
        process = session_forker().start(
            arguments, environment, *descriptors, folder=str(folder), prelude=prelude
        )
        code = process.wait(seconds)
        errors.seek(0)
        lines = errors.read().splitlines()
    assert code == status, lines
    (line,) = [line for line in lines if " INFO tandem" not in line]
    assert line.startswith("tandem: ")
    assert [word for word in words if word not in line] == []
    until(lambda: not _running_in(folder), "all processes to have ended")


def _running_in(folder: Path) -> bool:
    """True while a process runs that was started in the folder of a test."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                return True
    return False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--pd-server", "--pd-client"], ["--pd-server", "--pd-client"]),
        (["serve", "--pd-server", "--pd-url", "file://run"], ["file:///folder"]),
        (["router", "--pd-url", "file:///" + "d" * 100], ["too long for Unix sockets"]),
        (["serve", "builtin", "--hf-overrides", "[1]"], ["--hf-overrides '[1]'", "JSON object"]),
        (["info", "builtin", "--hf-overrides", "{a"], ["--hf-overrides '{a'", "JSON object"]),
        (["serve", "--pd-server", "--port", "9000"], ["--port", "not used with --pd-server"]),
        (["serve", "--pd-server", "--prefill-nodes", "2"], ["--prefill-nodes", "--pd-server"]),
        (["serve", "--pd-client", "--pd-url", "host"], ["--pd-url", "'host'", "host:port"]),
        (["serve", "--pd-server", "--pd-url", "host:99999"], ["host:99999"]),
        (["serve", "builtin", "--model", "builtin"], ["twice"]),
        (["serve", "--m", "a/b", "--w", "c/d"], ["twice", "--m, --w are one option"]),
        (["serve", "--m", "a/b", "--f", "c.bin"], ["--f 'c.bin' is not a .gguf file"]),
        (["serve", "builtin", "--revision", "v1"], ["--revision 'v1' is for a model on a hub"]),
        (["serve", "a/b", "--hf-token-path", "none"], ["--hf-token-path none: No such file"]),
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


def test_an_override_is_judged_as_the_config(tmp_path: Path) -> None:
    arguments = ["info", "builtin", "--hf-overrides", '{"num_hidden_layers": "2"}']
    fail(arguments, tmp_path, 1, "'2'", "config.json")


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
        ("TANDEM_TOKENS_OF_ALL", "looks like a secret"),
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
    message = "--carrier cuda_ipc is not possible here: the KV cache is not on a CUDA device"
    fail(arguments, tmp_path, 1, message, "use --device cuda, or --carrier auto")


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = broken_model(tmp_path / "m", vocab_size=512)
    arguments = ["serve", str(folder), "--load-format", "dummy", "--port", "0"]
    fail(arguments, tmp_path, 1, "tokenizer.json has 2048 tokens", "vocab_size is 512")


def test_a_prefill_node_of_another_model_is_refused_by_field_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = broken_model(
        tmp_path / "m", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}
    )
    monkeypatch.setattr(TestCluster, "forker", session_forker())
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        fail(["decode-node", "--port", port], tmp_path, 1, port)
        fail(["prefill-node", "--kv-port", port], tmp_path, 1, port, "KV", "--kv-port")
        fail(["serve", "--port", port], tmp_path, 1, port)


def test_an_advertised_place_that_cannot_be(tmp_path: Path) -> None:
    fail(["prefill-node", "--kv-advertise", "here"], tmp_path, 2, "--kv-advertise", "host:port")
    fail(["serve", "--kv-advertise", "a:8200"], tmp_path, 2, "--kv-advertise", "--pd-server")


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub.serving() as serving:
        serving.put_folder("owner/model", builtin_model_path())
        yield serving


def of_hub(hub: FakeHub, **others: str) -> dict[str, str]:
    """Variables with which models come from ``hub``."""
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **others}


@pytest.mark.parametrize("command", [["router", "--model"], ["decode-node"]])
def test_a_model_that_the_hub_does_not_have(
    tmp_path: Path, hub: FakeHub, command: list[str]
) -> None:
    words = f"'owner/none' is not on this machine, and cannot be downloaded from the hub: {hub.url}"
    fail([*command, "owner/none"], tmp_path, 1, words, variables=of_hub(hub, HF_HOME=str(tmp_path)))


FULL_DISK = """
import errno, os, tempfile
from huggingface_hub import file_download

def fail(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

tempfile.mkstemp = file_download.http_get = fail
"""


def test_a_disk_that_is_full(tmp_path: Path, hub: FakeHub) -> None:
    words = f"the disk of the cache {tmp_path / 'hub'} is full: free some", "by HF_HOME"
    variables = of_hub(hub, HF_HOME=str(tmp_path))
    fail(["pull", "owner/model"], tmp_path, 1, *words, prelude=FULL_DISK, variables=variables)


def test_a_cache_that_is_not_a_folder(tmp_path: Path, hub: FakeHub) -> None:
    cache = tmp_path / "file"
    cache.touch()
    words = f"the cache {cache} cannot be used (", "Not a directory): HF_HUB_CACHE moves it"
    variables = of_hub(hub, HF_HOME=str(tmp_path), HF_HUB_CACHE=str(cache))
    fail(["pull", "owner/model"], tmp_path, 1, *words, variables=variables)


def test_serve_judges_its_model_before_it_starts_a_part(tmp_path: Path) -> None:
    fail(["serve", "./none"], tmp_path, 1, "tandem: model './none' does not exist; give")
    fail(["serve", "owner/none"], tmp_path, 1, "tandem: 'owner/none' is not on", "HF_HUB_OFFLINE")
    for name in ("pull", "info"):
        fail([name, "owner/none@v1"], tmp_path, 1, "tandem: 'owner/none@v1' is not", "HF_HUB_OFF")
    assert list(tmp_path.iterdir()) == []  # not even a folder of logs


def test_serve_shows_the_error_of_a_part_that_cannot_start(tmp_path: Path) -> None:
    arguments = ["serve", "--kv-fraction", "0", "--port", "0"]
    fail(arguments, tmp_path, 1, "decode-node-0 ended with exit status 1", "one KV block")
