"""CPU cost per token of the `tandem bench` client, compared with httpx.

    python -m tandem.benchmarks.measuring_client

A server process writes one text-completion event to each of 64 streams every 20 ms, as a decode
node does. The cost is the client's user and system CPU time per token received.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import httpx

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.benchmarks.support.streaming import connected

STREAMS, STEP_SECONDS = 64, 0.02
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(number: int) -> bytes:
    choice = {"index": 0, "text": f" {number}", "logprobs": None, "finish_reason": None}
    event = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "builtin",
        "choices": [choice],
    }
    return _chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


def serve(ports: Connection, tokens: int) -> None:
    """Entry point of the server process: sends its port, and serves until terminated."""

    async def serve_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        begin = asyncio.get_running_loop().time()
        for number in range(tokens):
            writer.write(_event(number))
            step = int((asyncio.get_running_loop().time() - begin) / STEP_SECONDS) + 1
            await asyncio.sleep(begin + step * STEP_SECONDS - asyncio.get_running_loop().time())
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve_stream, "127.0.0.1", 0)
        ports.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def ours(port: int, tokens: int) -> int:
    """Tokens received by the `tandem bench` client."""
    with connected(port) as server:
        body = server.body("x", tokens)
        responses = await asyncio.gather(*(server.ask(body) for _ in range(STREAMS)))
    return sum(len(response.times) for response in responses)


async def by_httpx(port: int, tokens: int) -> int:
    """Tokens received by a minimal httpx client."""

    async def one(client: httpx.AsyncClient) -> int:
        samples: list[float] = []
        async with client.stream("POST", f"http://127.0.0.1:{port}/", json={}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    samples.append(time.perf_counter())
        return len(samples)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(STREAMS))))


def cost(ask: Callable[[int, int], Awaitable[int]], port: int, tokens: int) -> float:
    """CPU microseconds per token."""

    async def microseconds_per_token() -> float:
        before = time.process_time()
        num_tokens = await ask(port, tokens)
        if num_tokens != STREAMS * tokens:
            raise RuntimeError(f"{num_tokens} tokens of {STREAMS * tokens} came")
        return 1e6 * (time.process_time() - before) / num_tokens

    return asyncio.run(microseconds_per_token())


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=[there, options.tokens], daemon=True
    )
    process.start()
    port = here.recv()
    costs: dict[str, list[float]] = {"ours": [], "httpx": []}
    for _ in range(options.rounds):
        costs["ours"].append(cost(ours, port, options.tokens))
        costs["httpx"].append(cost(by_httpx, port, options.tokens))
    process.terminate()
    process.join(10)
    mine, theirs = (statistics.median(samples) for samples in costs.values())
    row = {
        "metric": f"client of tandem bench, {STREAMS} streams: CPU time of a token",
        "value": mine,
        "unit": "µs",
        "against": f"httpx ({theirs:.0f} µs)",
        "ratio": mine / theirs,
        "goal": "<=0.5",
    }
    publish("measuring_client", [row], dry=options.dry)


if __name__ == "__main__":
    main()
