"""``tandem run-batch``: the requests of a file, and a file of their results."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...shared.config.client import RunBatchConfig
from ...shared.errors import TandemError
from ...shared.process.backoff import Backoff
from ..openai_server import OpenAIServer, ServerError
from ..whole_file import check_target, whole_file
from ..worker_threads import WorkerThreads
from .file import BatchFile, BatchLine
from .partial_results import PartialResults
from .web_file import WebFileError, check_url, downloaded, is_url, shown, upload

# They say nothing about the request: it is tried again, for so long.
PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
PATIENCE_SECONDS = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
MAX_FAILURES = 3
Response = dict[str, Any]


class BatchError(TandemError):
    """The run was interrupted; another one continues it."""


class BatchRunner:
    """Answers the lines that have no result yet, several at once."""

    def __init__(self, server: OpenAIServer, results: PartialResults, concurrency: int) -> None:
        self._server = server
        self._results = results
        self._threads = WorkerThreads(concurrency)
        self._most = 2 * concurrency
        self._answers: queue.SimpleQueue[tuple[BatchLine, Response | Exception | None]] = (
            queue.SimpleQueue()
        )
        self._stopped = threading.Event()
        self.failed = 0

    def run(self, lines: Iterator[BatchLine], progress: Progress) -> None:
        """Raises ``ServerError`` if the server cannot be reached any more."""
        running = 0
        try:
            for line in lines:
                self._threads.submit(partial(self._serve, line))
                running += 1
                if running >= self._most:
                    self._collect(progress)
                    running -= 1
            for _ in range(running):
                self._collect(progress)
        finally:
            self._stopped.set()
            self._threads.stop()

    def _collect(self, progress: Progress) -> None:
        """Keep the next result."""
        line, response = self._answers.get()
        if isinstance(response, Exception):
            raise response
        self.failed += response is None or response["status_code"] != HTTPStatus.OK
        self._results.add(line.number, _result(line, response))
        progress.advance(progress.task_ids[0])

    def _serve(self, line: BatchLine) -> None:
        try:
            self._answers.put((line, self._answer(line)))
        except Exception as error:
            self._answers.put((line, error))

    def _answer(self, line: BatchLine) -> Response | None:
        """The response to a line, from a server that may be busy or restart; ``None`` if it takes
        too long."""
        backoff, failures = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = self._server.post(line.path, line.body)
            except httpx.ReadTimeout:
                return None
            except httpx.HTTPError as error:
                if time.monotonic() > deadline or self._stopped.is_set():
                    raise ServerError(
                        f"{self._server.url}: {error or type(error).__name__}"
                    ) from None
            else:
                failures += answer.status_code not in PASSING
                passing = answer.status_code >= 500 or answer.status_code in PASSING
                if not passing or failures >= MAX_FAILURES or time.monotonic() > deadline:
                    return _response(answer)
            if self._stopped.wait(backoff.pause()):
                raise ServerError("the run ends")


def _response(answer: httpx.Response) -> Response:
    try:
        body = answer.json()
    except ValueError:
        body = {"error": {"message": answer.text[:1000], "type": "invalid_response"}}
    request_id = answer.headers.get("x-request-id") or secrets.token_hex(16)
    return {"status_code": answer.status_code, "request_id": request_id, "body": body}


def _result(line: BatchLine, response: Response | None) -> dict[str, Any]:
    """A line of the output, as in OpenAI's API."""
    late = {"code": "request_timeout", "message": "The server did not answer within --timeout."}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": late if response is None else None,
    }


def run_batch(server: OpenAIServer, config: RunBatchConfig) -> None:
    """Answer the requests of the input, and write the output when all are. Raises ``TandemError``;
    another run keeps what is answered."""
    source, target = config.files
    if is_url(target):
        check_url("--output-file", target)
    else:
        check_target("--output-file", target)
    with contextlib.ExitStack() as until_end:
        file = BatchFile(until_end.enter_context(_local(source)), shown(source))
        file.check()
        results = PartialResults(_partial_path(config, target, file.digest), file.digest)
        until_end.callback(results.close)
        results.open()
        runner = BatchRunner(server, results, config.max_concurrency)
        done = results.done
        with _progress(file.count, len(done)) as progress:
            try:
                runner.run((line for line in file.lines() if line.number not in done), progress)
            except ServerError as error:
                raise BatchError(
                    f"{error}; {len(results.done)} of {file.count} requests are answered, and the "
                    "same command continues with the others"
                ) from None
        _write(target, results)
        results.close(remove=True)
    failed = f", {runner.failed} of them with an error" if runner.failed else ""
    print(f"{file.count} requests answered{failed}: {shown(target)}", file=sys.stderr)


def _partial_path(config: RunBatchConfig, target: str, digest: str) -> Path:
    if not is_url(target):
        folder, name = Path(target).parent, Path(target).name
    else:
        # The same for the same run, and for no other.
        run = hashlib.sha256(f"{digest} {shown(target)}".encode()).hexdigest()[:16]
        folder, name = Path(tempfile.gettempdir()), f"tandem-{run}.jsonl"
    return Path(config.output_tmp_dir or folder) / f"{name}.partial"


def _progress(total: int, done: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    made = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    made.add_task("requests", total=total, completed=done)
    return made


@contextlib.contextmanager
def _local(source: str) -> Iterator[Path]:
    """The input as a file on this machine."""
    if not is_url(source):
        yield Path(source)
        return
    check_url("--input-file", source)
    with downloaded("--input-file", source) as path:
        yield path


def _write(target: str, results: PartialResults) -> None:
    if not is_url(target):
        with whole_file("--output-file", target) as file:
            file.writelines(results.in_order())
        return
    with tempfile.TemporaryFile() as whole:
        whole.writelines(line.encode() for line in results.in_order())
        try:
            upload("--output-file", target, whole)
        except WebFileError as error:
            raise BatchError(f"{error}; the same command tries it again") from None
