"""Greedy completions of full length by the client of `tandem bench`, which costs little: it shares
the cores with what it measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.bench.client.api_server import ApiServer
from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.client.pool import HttpClient, Target
from tandem.bench.running_streams import greedy_body

REQUEST_SECONDS = 1800.0


@contextmanager
def connected(port: int) -> Iterator[ApiServer]:
    """Connect to a server on this machine."""
    client = HttpClient(Target.of_url(f"http://127.0.0.1:{port}"))
    try:
        yield ApiServer(client, request_seconds=REQUEST_SECONDS)
    finally:
        client.close()


async def complete(
    server: ApiServer, prompt: list[int], max_tokens: int, response: MeasuredResponse | None = None
) -> MeasuredResponse:
    """Stream a completion to its end. Raises ``RuntimeError`` if that comes too early."""
    response = await server.ask(greedy_body(server, prompt, max_tokens), response)
    if response.error or len(response.times) != max_tokens:
        raise RuntimeError(f"{len(response.times)} tokens of {max_tokens} came: {response.error}")
    return response
