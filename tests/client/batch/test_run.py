"""``tandem run-batch``: results in order, atomic files, and runs that are continued."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.client.batch import run as module
from tandem.client.batch.partial_results import PartialResults
from tandem.client.batch.run import BatchError, run_batch
from tandem.client.openai_server import OpenAIServer
from tandem.shared.config.client import ConnectionConfig, RunBatchConfig
from tandem.shared.errors import TandemError, UsageError


class CapitalsServer:
    """Replies with the prompt in capitals, after the ``errors`` of the prompt."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.errors: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def handle(self, request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        with self._lock:
            self.requests.append((request.url.path, prompt))
            planned = self.errors.get(prompt)
            error = planned.pop(0) if planned else None
        if isinstance(error, Exception):
            raise error
        if error is not None:
            return httpx.Response(error, json={"error": {"message": "no"}})
        return httpx.Response(200, json={"text": prompt.upper()}, headers={"x-request-id": "r"})

    def client(self) -> OpenAIServer:
        return OpenAIServer(ConnectionConfig(), httpx.MockTransport(self.handle))


def requests(folder: Path, *prompts: str) -> RunBatchConfig:
    lines = [
        {"custom_id": f"c-{p}", "method": "POST", "url": "/v1/completions", "body": {"prompt": p}}
        for p in prompts
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    files: dict[str, Any] = {
        "input_file": str(folder / "in.jsonl"),
        "output_file": str(folder / "out.jsonl"),
    }
    return RunBatchConfig(max_concurrency=4, **files)


def output(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


def test_results_are_in_the_order_of_the_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"p{i}" for i in range(30)]
    server = CapitalsServer()
    server.errors = {"p3": [400]}
    run_batch(server.client(), requests(tmp_path, *prompts))
    lines = output(tmp_path)
    assert [line["custom_id"] for line in lines] == [f"c-{p}" for p in prompts]
    assert lines[7]["response"] == {
        "status_code": 200,
        "request_id": "r",
        "body": {"text": "P7"},
    }
    assert lines[3]["response"]["status_code"] == 400 and lines[3]["error"] is None
    assert {path for path, _ in server.requests} == {"/v1/completions"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "30 requests done, 1 of them with an error" in capsys.readouterr().err


def test_a_run_that_breaks_off_goes_on(tmp_path: Path) -> None:
    config = requests(tmp_path, "a", "b", "c")
    (tmp_path / "out.jsonl").write_text("former\n")
    server = CapitalsServer()
    server.errors = {"c": [httpx.ConnectError("gone")]}
    with pytest.raises(BatchError, match=r"gone; \d of 3 requests have results; run the same"):
        run_batch(server.client(), config)
    assert (tmp_path / "out.jsonl").read_text() == "former\n"
    partial = tmp_path / "out.jsonl.partial"
    count = len(partial.read_bytes().splitlines()) - 1
    with partial.open("ab") as file:
        file.write(b'{"line": 5, "resu')  # as a crash leaves it
    server.requests.clear()
    run_batch(server.client(), config)
    assert [line["response"]["body"]["text"] for line in output(tmp_path)] == ["A", "B", "C"]
    assert len(server.requests) == 3 - count and not partial.exists()


def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 600.0)
    server = CapitalsServer()
    server.errors = {"a": [503, 429, httpx.ReadError("reset"), 503], "b": [500] * 9}
    run_batch(server.client(), requests(tmp_path, "a", "b"))
    first, second = output(tmp_path)
    assert (first["response"]["status_code"], second["response"]["status_code"]) == (200, 500)
    assert len([prompt for _, prompt in server.requests if prompt == "b"]) == module.MAX_FAILURES


def test_a_request_that_takes_too_long_has_an_error(tmp_path: Path) -> None:
    server = CapitalsServer()
    server.errors = {"a": [httpx.ReadTimeout("late")]}
    run_batch(server.client(), requests(tmp_path, "a", "b"))
    first, second = output(tmp_path)
    assert first["response"] is None and first["error"]["code"] == "request_timeout"
    assert second["response"]["status_code"] == 200


def test_results_of_another_input_are_not_mixed(tmp_path: Path) -> None:
    config = requests(tmp_path, "a")
    (tmp_path / "out.jsonl.partial").write_text('{"input": "other"}\n')
    with pytest.raises(UsageError, match=r"out\.jsonl\.partial has results of another input"):
        run_batch(CapitalsServer().client(), config)


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    config = requests(tmp_path, "a")
    first = PartialResults(tmp_path / "out.jsonl.partial", "digest")
    first.open()
    with pytest.raises(UsageError, match="another run writes"):
        run_batch(CapitalsServer().client(), config)
    first.close(remove=True)


GOOD = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[", r"in\.jsonl:2 is not a JSON object"),
        ("3", "is not a JSON object"),
        (json.dumps({**GOOD, "custom_id": 3}), "'custom_id' must be a string"),
        (json.dumps({**GOOD, "method": "GET"}), "'method' must be 'POST', not 'GET'"),
        (json.dumps({**GOOD, "url": "http://x"}), "'url' must be a path such as"),
        (json.dumps({**GOOD, "url": "/v1/../admin"}), "'url' must be a path such as"),
        (json.dumps({**GOOD, "body": {"stream": True}}), "'stream' is not available"),
    ],
)
def test_an_invalid_line_is_found_before_anything_is_sent(
    tmp_path: Path, line: str, words: str
) -> None:
    config = requests(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps(GOOD) + "\n" + line)
    server = CapitalsServer()
    with pytest.raises(UsageError, match=words):
        run_batch(server.client(), config)
    assert server.requests == [] and not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"input_file": "in"}, "needs -o RESULTS.jsonl"),
        ({"output_file": "out"}, "needs -i REQUESTS.jsonl"),
        ({"input_file": "/none/in", "output_file": "o"}, "--input-file /none/in: No such file"),
        ({"output_file": "/none/out"}, "--output-file /none/out: the folder does not exist"),
    ],
)
def test_files_that_are_not_there(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    config = requests(tmp_path, "a")
    if len(files) == 1 and files.get("output_file") == "/none/out":
        files = {"input_file": config.input_file or "", **files}
    with pytest.raises(TandemError, match=words):
        run_batch(CapitalsServer().client(), RunBatchConfig(**files))
