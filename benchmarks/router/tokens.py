"""Streamed tokens per second of a router on one core: ``python -m ...router.tokens``.

A real ``tandem router`` runs on one core; a simulated decode node and all clients share a process
on the other core (``router_tokens_load.py``). In the same run, a bare ASGI server on uvicorn writes
the same events to the same clients as an upper bound. Each figure is the best of ``--rounds``,
because the machine is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem.benchmarks.fleet import MeasuredRouter
from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.report import load_parser, publish
from tandem.benchmarks.support.router_tokens_load import MARK
from tandem.benchmarks.support.sides import pinned

LOAD = "tandem.benchmarks.support.router_tokens_load"
RUN_SECONDS = 300.0
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"tiny","choices":[{"index":0,"delta":{"content":" word%s"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n' % MARK
)
# Events of one stream before the bare server turns to the others.
TURN = 8


@dataclass(frozen=True, slots=True)
class Passed:
    """Tokens and events forwarded by a server in one round."""

    tokens: int
    events: int
    seconds: float
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.tokens / self.cpu_seconds


def bare(tokens: int) -> Callable[..., Any]:
    """An ASGI application that writes events and does nothing else."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(tokens):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            if number % TURN == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return application


def serve_bare(tokens: int, handle: int) -> None:
    """Run the bare server on an open socket."""
    import uvicorn

    config = uvicorn.Config(
        bare(tokens), http="httptools", log_level="error", access_log=False, lifespan="off"
    )
    listening = socket.socket(fileno=handle)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))


def of_bare(options: argparse.Namespace, cores: list[int]) -> Passed:
    """One round of the bare server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        handle, port = listening.fileno(), listening.getsockname()[1]
        command = [sys.executable, "-m", "tandem.benchmarks.router.tokens"]
        with pinned(cores[:1]):
            server = subprocess.Popen(
                [*command, f"--bare={handle}", f"--tokens={options.tokens}"], pass_fds=[handle]
            )
        try:
            time.sleep(1.0)
            return _load(options, cores, psutil.Process(server.pid), [f"--http={port}"])
        finally:
            server.terminate()
            server.wait()


def of_router(options: argparse.Namespace, cores: list[int]) -> Passed:
    """One round of a router."""
    with tempfile.TemporaryDirectory() as folder:
        with pinned(cores[:1]):
            router = MeasuredRouter(Path(folder) / "router.log", 1)
        try:
            load = [f"--http={router.http_port}", f"--registry={router.registry}"]
            process = psutil.Process(router.process.pid)
            return _load(options, cores, process, [*load, f"--folder={folder}/model"])
        finally:
            router.stop()


def _load(
    options: argparse.Namespace, cores: list[int], server: psutil.Process, flags: list[str]
) -> Passed:
    counts = [f"--streams={options.streams}", f"--tokens={options.tokens}"]
    with pinned(cores[1:]):
        process = subprocess.Popen(
            [sys.executable, "-m", LOAD, *counts, *flags], stdout=subprocess.PIPE, text=True
        )
    try:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        start, cpu = time.monotonic(), sum(server.cpu_times()[:2])
        report = json.loads(process.stdout.readline())
        seconds, cpu_seconds = time.monotonic() - start, sum(server.cpu_times()[:2]) - cpu
        process.wait(RUN_SECONDS)
    finally:
        process.kill()
        process.communicate()
    expected = options.streams * options.tokens
    if report["received"] != expected:
        raise RuntimeError(f"{report['received']} tokens of {expected} came")
    return Passed(expected, report["events"], seconds, cpu_seconds)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the report."""
    cores = two_cores()
    rounds = range(options.rounds)

    def best(one: Callable[[], Passed]) -> Passed:
        return max((one() for _ in rounds), key=lambda result: result.tokens_per_second)

    physical = best(lambda: of_bare(options, cores))
    streamed = best(lambda: of_router(options, cores))
    load = f"{options.streams} streams"
    rate = streamed.tokens_per_second
    return [
        {
            "metric": f"bare ASGI server, {load}: events",
            "value": physical.tokens_per_second,
            "unit": "events/s",
        },
        {
            "metric": f"router on one core, {load}: tokens",
            "value": rate,
            "unit": "tokens/s",
            "goal": ">=40000",
        },
        {
            "metric": f"router on one core, {load}: tokens of the bare server's events",
            "value": rate,
            "unit": "tokens/s",
            "against": "bare ASGI server",
            "ratio": rate / physical.tokens_per_second,
        },
        {
            "metric": f"router, {load}: tokens a second of its CPU time",
            "value": streamed.tokens_per_cpu_second,
            "unit": "tokens/s",
        },
        {
            "metric": f"router, {load}: tokens an event",
            "value": streamed.tokens / streamed.events,
            "unit": "tokens",
        },
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse ``arguments``, by default the command line's."""
    parser = load_parser(__doc__, streams=64, tokens=4000, rounds=3)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.bare is not None:
        serve_bare(options.tokens, options.bare)
        return
    publish("router/tokens", measure(options), dry=options.dry)


if __name__ == "__main__":
    main()
