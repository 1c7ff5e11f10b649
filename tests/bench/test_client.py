"""The measuring client: streams cut anywhere, connections reused, failures in the response."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from tandem.bench.client.connection import ExchangeFailed, HttpConnection
from tandem.bench.client.measured_response import MAX_LINE_BYTES, MeasuredResponse, StreamError
from tandem.bench.client.pool import Target
from tandem.shared.errors import BenchmarkError, UsageError
from tandem.tests.bench.fake_api import fake_api
from tandem.tests.support.certificates import issue


def stream(*events: dict | str) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return b"".join(b"data: " + line.encode() + b"\n\n" for line in lines)


def text(value: str, **more: object) -> dict:
    return {"choices": [{"text": value, "finish_reason": None, **more}]}


COMPLETION = stream(
    text("a"), text("", token_ids=[]), text("é", token_ids=[1, 2]), text("")
) + stream({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}, "[DONE]")


def test_a_stream_may_be_cut_anywhere() -> None:
    for cut in range(len(COMPLETION)):
        response = MeasuredResponse()
        response.feed(COMPLETION[:cut], 1.0)
        response.feed(COMPLETION[cut:], 2.0)
        assert (response.text, response.prompt_tokens, response.output_tokens) == ("aé", 7, 4), cut
        assert len(response.times) == 4 and len(response.arrivals) == 3
        assert set(response.times) <= {1.0, 2.0}


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        ({"role": "assistant"}, 0),
        ({"role": "assistant", "content": ""}, 0),
        ({"content": "x"}, 1),
        ({"reasoning_content": "x"}, 1),
        ({"tool_calls": [{"index": 0}]}, 1),
    ],
)
def test_events_of_a_chat_count_when_they_have_output(delta: dict, tokens: int) -> None:
    response = MeasuredResponse()
    response.feed(stream({"choices": [{"delta": delta}]}), 1.0)
    assert len(response.times) == tokens


def test_the_last_event_of_a_completion_is_no_token_without_text() -> None:
    response = MeasuredResponse()
    response.feed(stream(text("a"), {"choices": [{"text": "", "finish_reason": "stop"}]}), 1.0)
    assert len(response.times) == 1


def test_an_event_that_is_no_json_or_an_error_or_endless_ends_the_stream() -> None:
    for line, word in ((b"data: {", "not JSON"), (b'data: {"error": {"message": "no"}}', "no")):
        with pytest.raises(StreamError, match=word):
            MeasuredResponse().feed(line + b"\n", 0.0)
    for event in ({"choices": [1]}, {"choices": 3}, {"usage": 4}, {"choices": [{"token_ids": 5}]}):
        with pytest.raises(StreamError, match="not OpenAI's"):
            MeasuredResponse().feed(stream(event), 0.0)
    with pytest.raises(StreamError, match="longer"):
        MeasuredResponse().feed(b"x" * (MAX_LINE_BYTES + 1), 0.0)


async def test_connections_are_reused_and_replaced_when_the_server_has_closed_them() -> None:
    async with fake_api() as api:
        server = api.server(model="fake")
        for _ in range(3):
            assert (await server.ask(server.body("a b", 2))).success
        assert api.connections == 1
        api.close_after = True
        for _ in range(2):
            assert (await server.ask(server.body("a b", 2))).success
            await asyncio.sleep(0)  # the end of the connection arrives, or has not yet
        assert api.connections >= 2
        server.client.close()


async def test_a_response_has_its_lengths_and_times() -> None:
    async with fake_api() as api:
        server = api.server(backend="openai-chat", model="fake")
        response = await server.ask(server.body("one two three", 4), request_id="me-1")
        server.client.close()
    assert "x-request-id: me-1" in api.heads[-1]
    assert (response.prompt_tokens, response.output_tokens, response.remote_tokens) == (6, 4, 5)
    assert len(response.arrivals) == 4 and response.sent_at <= response.arrivals[0]
    assert response.text == " 0 1 2 3"


async def test_a_rejection_is_in_the_measured_response() -> None:
    async with fake_api(statuses=[(400, "too long")]) as api:
        server = api.server()
        response = await server.ask(server.body("a", 1))
        server.client.close()
    assert (response.success, response.error) == (False, "HTTP 400: too long")


async def test_a_refused_connection_is_in_the_response_and_an_error_of_the_command() -> None:
    async with fake_api() as api:
        server = api.server()
    response = await server.ask(server.body("a", 1))
    assert not response.success and "Connect call failed" in response.error
    with pytest.raises(BenchmarkError, match=r"cannot reach 127\.0\.0\.1"):
        await server.first_model()


async def test_certificates_are_checked_by_default(tmp_path: Path) -> None:
    papers = issue(tmp_path, "127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(papers.cert, papers.key)
    async with fake_api(tls=tls) as api:
        strict, lenient = api.server(), api.server(insecure=True)
        response = await strict.ask(strict.body("a", 1))
        assert "CERTIFICATE_VERIFY_FAILED" in response.error
        assert (await lenient.ask(lenient.body("a", 1))).success
        lenient.client.close()


async def respond(response: bytes) -> str:
    """The error of an exchange with a server that sends these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    _, connection = await asyncio.get_running_loop().create_connection(
        HttpConnection, "127.0.0.1", port
    )
    parts: list[bytes] = []
    try:
        await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", lambda data, _: parts.append(data))
        return b"".join(parts).decode()
    except ExchangeFailed as error:
        return str(error)
    finally:
        connection.close()
        listening.close()


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", "ab"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", "until the end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab", "in the middle of the response"),
        (b"", "before a response"),
        (b"SSH-2.0-OpenSSH\r\n", "not an HTTP response"),
    ],
)
async def test_responses_end_or_break(response: bytes, outcome: str) -> None:
    assert outcome in await respond(response)


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:port", "http://[::1", "http://a..b"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--base-url"):
        Target.of_url(url)


def test_urls_may_have_a_path_and_no_scheme() -> None:
    assert Target.of_url("host:1/v/").path == "/v"
    assert Target.of_url("https://[::1]").authority == "[::1]:443"


@pytest.mark.parametrize("header", ["x", "=1", "a b=1", "a=1\r\nb: 2"])
async def test_a_wrong_header_is_refused(header: str) -> None:
    async with fake_api() as api:
        with pytest.raises(UsageError, match="--header"):
            api.server(header=[header])
