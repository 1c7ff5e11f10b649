"""``tandem run-batch`` with an input and an output at URLs of a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.client.batch import run as module
from tandem.client.batch import web_file
from tandem.client.batch.run import BatchError, run_batch
from tandem.client.batch.web_file import WebFileError, without_secrets
from tandem.shared.config.client import RunBatchConfig
from tandem.shared.errors import UsageError

from .test_run import CapitalsServer, output, requests


class Store(ThreadingHTTPServer):
    """Files by path; ``errors`` are the statuses of the next responses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StoreHandler)
        self.files: dict[str, bytes] = {}
        self.errors: list[int] = []
        self.heads: list[dict[str, str]] = []
        self.stalls = threading.Event()
        self.stalls.set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class StoreHandler(BaseHTTPRequestHandler):
    server: Store

    def log_message(self, *args: Any) -> None:
        pass

    def path_alone(self) -> str:
        return self.path.partition("?")[0]

    def do_GET(self) -> None:
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        data = self.server.files[self.path_alone()]
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:5])
        self.wfile.flush()
        self.server.stalls.wait(20)
        self.wfile.write(data[5:])

    def do_PUT(self) -> None:
        self.server.heads.append({name.lower(): value for name, value in self.headers.items()})
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        self.server.files[self.path_alone()] = data
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.01,))
        thread.start()
        yield store
        store.stalls.set()
        store.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_file, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


def remote(store: Store, folder: Path, *prompts: str) -> RunBatchConfig:
    requests(folder, *prompts)
    store.files["/in.jsonl"] = (folder / "in.jsonl").read_bytes()
    return RunBatchConfig(
        input_file=f"{store.url}/in.jsonl?signature=secret",
        output_file=f"{store.url}/out.jsonl?signature=secret",
        output_tmp_dir=str(folder),
    )


def test_input_and_output_are_at_urls(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = remote(store, tmp_path, "a", "b")
    store.errors = [503, 500]
    run_batch(CapitalsServer().client(), config)
    (tmp_path / "out.jsonl").write_bytes(store.files["/out.jsonl"])
    assert [line["response"]["body"]["text"] for line in output(tmp_path)] == ["A", "B"]
    (head,) = store.heads
    assert int(head["content-length"]) == len(store.files["/out.jsonl"])
    assert "transfer-encoding" not in head, "which object stores refuse"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    stderr = capsys.readouterr().err
    assert f"2 requests done: {store.url}/out.jsonl" in stderr and "secret" not in stderr


def test_an_upload_that_fails_keeps_the_results(store: Store, tmp_path: Path) -> None:
    server, remotes = CapitalsServer(), remote(store, tmp_path, "a")
    config = replace(remotes, input_file=str(tmp_path / "in.jsonl"))
    store.errors = [503] * web_file.MAX_ATTEMPTS
    with pytest.raises(
        BatchError, match=r"out\.jsonl: 503 Service Unavailable; run the same command"
    ):
        run_batch(server.client(), config)
    assert len(server.requests) == 1 and list(tmp_path.glob("tandem-*.jsonl.partial"))
    run_batch(server.client(), config)
    assert len(server.requests) == 1 and json.loads(store.files["/out.jsonl"])["custom_id"] == "c-a"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"MAX_BYTES": 9}, "more than 9 bytes; give a path instead"),
        ({"TRANSFER_SECONDS": 0.0}, "takes more than 0 s"),
        ({"SILENCE_SECONDS": 0.05, "MAX_ATTEMPTS": 2}, "timed out"),
    ],
)
def test_transfers_are_bounded(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, float],
    words: str,
) -> None:
    config = remote(store, tmp_path, "a")
    for name, value in limits.items():
        monkeypatch.setattr(web_file, name, value)
    if "SILENCE_SECONDS" in limits:
        store.stalls.clear()
    with pytest.raises(WebFileError, match=words) as raised:
        run_batch(CapitalsServer().client(), config)
    assert str(raised.value).startswith(f"--input-file {store.url}/in.jsonl: ")


@pytest.mark.parametrize("status", [403, 404])
def test_a_refused_transfer_is_not_repeated(store: Store, tmp_path: Path, status: int) -> None:
    config = remote(store, tmp_path, "a")
    store.errors = [status, 500]
    with pytest.raises(WebFileError, match=f"in.jsonl: {status} "):
        run_batch(CapitalsServer().client(), config)
    assert store.errors == [500]


@pytest.mark.parametrize("flag", ["input_file", "output_file"])
def test_an_invalid_url_is_found_before_anything_is_sent(tmp_path: Path, flag: str) -> None:
    config = replace(requests(tmp_path, "a"), output_file="out")
    for url in ("http://", "https://[::x]/in"):
        with pytest.raises(UsageError, match=flag.replace("_", "-")):
            fields: dict[str, Any] = {flag: url}
            run_batch(CapitalsServer().client(), replace(config, **fields))


def test_what_may_be_secret_is_not_shown() -> None:
    assert without_secrets("https://u:p@h:1/a/b?X-Signature=s#f") == "https://h:1/a/b"
    assert without_secrets("folder/a?b") == "folder/a?b"
