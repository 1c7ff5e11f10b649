"""Greedy completions of full length by the client of `tandem bench`, which costs little: it shares
the cores with what it measures."""

from __future__ import annotations

from tandem.bench.client.api_server import ApiServer
from tandem.bench.client.http_client import HttpClient, Target
from tandem.bench.client.measured_answer import MeasuredAnswer

REQUEST_SECONDS = 1800.0


def server_at(port: int) -> ApiServer:
    """A server on this machine."""
    client = HttpClient(Target.of_url(f"http://127.0.0.1:{port}"))
    return ApiServer(client, request_seconds=REQUEST_SECONDS)


async def complete(
    port: int, prompt: list[int], max_tokens: int, answer: MeasuredAnswer | None = None
) -> MeasuredAnswer:
    """Stream a completion to its end. ``answer`` grows while it runs."""
    server = server_at(port)
    body = server.body(prompt, max_tokens, temperature=0, ignore_eos=True, return_token_ids=True)
    try:
        answer = await server.ask(body, answer)
    finally:
        server.client.close()
    if answer.error or len(answer.times) != max_tokens:
        raise RuntimeError(f"{len(answer.times)} tokens of {max_tokens} came: {answer.error}")
    return answer
