"""``tandem run-batch``: requests from a file, and results to another."""

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
from .web_file import WebFileError, check_url, download, is_url, upload, without_secrets

# Transient statuses, for which a request is retried until the time limit.
TRANSIENT = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
RETRY_SECONDS = 600.0
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
MAX_FAILURES = 3
Response = dict[str, Any]


class BatchError(TandemError):
    """The run was interrupted; another one continues it."""


class BatchRunner:
    """Sends the requests of lines without a result, several at once."""

    def __init__(self, server: OpenAIServer, results: PartialResults, concurrency: int) -> None:
        self._server = server
        self._results = results
        self._threads = WorkerThreads(concurrency)
        self._max_running = 2 * concurrency
        self._responses: queue.SimpleQueue[tuple[BatchLine, Response | Exception | None]] = (
            queue.SimpleQueue()
        )
        self._stopped = threading.Event()
        self.failed = 0

    def run(self, lines: Iterator[BatchLine], progress: Progress) -> None:
        """Raises ``ServerError`` if the server can no longer be reached."""
        running = 0
        try:
            for line in lines:
                self._threads.submit(partial(self._serve, line))
                running += 1
                if running >= self._max_running:
                    self._collect(progress)
                    running -= 1
            for _ in range(running):
                self._collect(progress)
        finally:
            self._stopped.set()
            self._threads.stop()

    def _collect(self, progress: Progress) -> None:
        """Wait for the next result, and add it to the results."""
        line, response = self._responses.get()
        if isinstance(response, Exception):
            raise response
        self.failed += response is None or response["status_code"] != HTTPStatus.OK
        self._results.add(line.number, _result(line, response))
        progress.advance(progress.task_ids[0])

    def _serve(self, line: BatchLine) -> None:
        try:
            self._responses.put((line, self._send(line)))
        except Exception as error:
            self._responses.put((line, error))

    def _send(self, line: BatchLine) -> Response | None:
        """Send a request, again while the server is busy or restarts; returns ``None`` at the
        ``--timeout``."""
        backoff, failures = Backoff(FIRST_PAUSE, MAX_PAUSE), 0
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                response = self._server.post(line.path, line.body)
            except httpx.ReadTimeout:
                return None
            except httpx.HTTPError as error:
                if time.monotonic() > deadline or self._stopped.is_set():
                    raise ServerError(
                        f"{self._server.url}: {error or type(error).__name__}"
                    ) from None
            else:
                status = response.status_code
                failures += status not in TRANSIENT
                may_retry = status >= 500 or status in TRANSIENT
                if not may_retry or failures >= MAX_FAILURES or time.monotonic() > deadline:
                    return _response(response)
            if self._stopped.wait(backoff.pause()):
                raise ServerError("the run ends")


def _response(response: httpx.Response) -> Response:
    try:
        body = response.json()
    except ValueError:
        body = {"error": {"message": response.text[:1000], "type": "invalid_response"}}
    request_id = response.headers.get("x-request-id") or secrets.token_hex(16)
    return {"status_code": response.status_code, "request_id": request_id, "body": body}


def _result(line: BatchLine, response: Response | None) -> dict[str, Any]:
    """A line of the output, in the format of OpenAI's API."""
    late = {"code": "request_timeout", "message": "The server did not respond within --timeout."}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": late if response is None else None,
    }


def run_batch(server: OpenAIServer, config: RunBatchConfig) -> None:
    """Run the requests of the input, and write the output once all have results. Raises
    ``TandemError``; another run then continues with the remaining requests."""
    source, target = config.files
    if is_url(target):
        check_url("--output-file", target)
    else:
        check_target("--output-file", target)
    with contextlib.ExitStack() as until_end:
        file = BatchFile(until_end.enter_context(_local(source)), without_secrets(source))
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
                    f"{error}; {len(results.done)} of {file.count} requests have results; run the "
                    "same command again to continue with the others"
                ) from None
        _write(target, results)
        results.close(remove=True)
    failed = f", {runner.failed} of them with an error" if runner.failed else ""
    print(f"{file.count} requests done{failed}: {without_secrets(target)}", file=sys.stderr)


def _partial_path(config: RunBatchConfig, target: str, digest: str) -> Path:
    if not is_url(target):
        folder, name = Path(target).parent, Path(target).name
    else:
        # The same name for the same input and output.
        run = hashlib.sha256(f"{digest} {without_secrets(target)}".encode()).hexdigest()[:16]
        folder, name = Path(tempfile.gettempdir()), f"tandem-{run}.jsonl"
    return Path(config.output_tmp_dir or folder) / f"{name}.partial"


def _progress(total: int, done: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    progress = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    progress.add_task("requests", total=total, completed=done)
    return progress


@contextlib.contextmanager
def _local(source: str) -> Iterator[Path]:
    """The input as a file on this machine."""
    if not is_url(source):
        yield Path(source)
        return
    check_url("--input-file", source)
    with download("--input-file", source) as path:
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
            raise BatchError(f"{error}; run the same command to try again") from None
