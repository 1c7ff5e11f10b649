"""Invalid HTTP: bodies, headers and connections that are too large, slow or malformed."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.openai.openai_errors import check
from tandem.tests.router.support import Cluster, cluster


@pytest.fixture
async def c(tmp_path: Path) -> Any:
    async with cluster(tmp_path, max_body_bytes=2_000_000, body_timeout=0.5) as running:
        yield running


NO_OBJECT = "The request body must be a JSON object."
NO_TEXT = "The body is not valid UTF-8."
NO_JSON = "The body is not valid JSON: "
CUT = NO_JSON + "it ends early, or in half of a surrogate pair."
NESTED = NO_JSON + "it is nested too deeply."
JSON = {"content-type": "application/json"}
BODIES: tuple[tuple[bytes, str], ...] = (
    (b"", CUT),
    (b"[]", NO_OBJECT),
    (b'{"prompt": "\xff"}', NO_TEXT),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", NESTED),
)


async def test_bodies_that_are_not_json(c: Cluster) -> None:
    for body, message in BODIES:
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await c.client.post(path, content=body, headers=JSON)
            assert check(response, 400)["message"].startswith(message), body[:50]


COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
# Method, path, status, message, code.
ROUTES: tuple[tuple[str, str, int, str, str | None], ...] = (
    *(
        (
            method,
            path,
            405,
            f"Not allowed to {method} on {path}; use {use}.",
            "method_not_supported",
        )
        for path, use, methods in (
            (COMPLETIONS, "POST", ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")),
            ("/", "GET", ("POST", "PUT", "DELETE", "OPTIONS")),
            ("/health", "GET", ("POST", "DELETE")),
            ("/metrics", "GET", ("POST",)),
            (f"{MODELS}/tiny", "GET", ("POST", "DELETE")),
        )
        for method in methods
    ),
    *(
        (method, path, 404, f"Invalid URL ({method} {path[:200]})", "unknown_url")
        for path in ("/nowhere", "/v1", "/v1/", "/V1/models", "/health/", "/x" * 300)
        for method in ("GET", "POST")
    ),
    ("POST", f"{COMPLETIONS}/", 404, f"Invalid URL (POST {COMPLETIONS}/)", "unknown_url"),
    *(
        ("GET", f"{MODELS}/{name}", 404, f"The model '{quoted}' does not exist;", "model_not_found")
        for name, quoted in (
            ("other", "other"),
            ("tiny/x", "tiny/x"),
            ("%2e%2e", ".."),
            ("a%2Fb", "a/b"),
            ("", "?"),
            ("x" * 300, "x" * 128 + "..."),
        )
    ),
)


async def test_wrong_routes_and_methods(c: Cluster) -> None:
    for method, path, status, message, code in ROUTES:
        response = await c.client.request(method, path, content=b"{}", headers=JSON)
        error = check(response, status)
        assert error["message"].startswith(message) and error["code"] == code, (method, path)
        if status == 405:
            assert message.endswith(f"use {response.headers['allow']}.")
    check(await c.complete(model="other"), 404)
    assert (await c.client.get("/v1/models/tiny")).json()["id"] == "tiny"


@pytest.mark.parametrize("kind", [{}, {"content-type": "text/plain"}])
async def test_bodies_of_other_types(c: Cluster, kind: dict[str, str]) -> None:
    response = await c.client.post(COMPLETIONS, content=b"{}", headers=kind)
    assert check(response, 415)["message"] == "The content type must be 'application/json'."
    assert response.headers["connection"] == "close"


async def test_other_hosts_are_refused_wherever_they_ask(c: Cluster) -> None:
    for path in ("/", MODELS, "/nowhere", "/metrics", COMPLETIONS):
        response = await c.client.get(path, headers={"host": "evil.example"})
        error = check(response, 403)
        assert "'evil.example' is not allowed; start the router with" in error["message"]
        assert error["code"] == "host_not_allowed"


async def test_without_a_node_responses_have_retry_after(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        for path in ("/health", "/ready", MODELS, f"{MODELS}/tiny", f"{MODELS}/other"):
            _check_waiting(await c.client.get(path))
        for path in (COMPLETIONS, "/v1/chat/completions"):
            _check_waiting(await c.client.post(path, json={}))


def _check_waiting(response: Any) -> None:
    error = check(response, 503)
    assert error["message"] == "No decode node has joined this router yet; try again soon."
    assert (error["type"], error["code"]) == ("server_error", "unavailable")
    assert response.headers["retry-after"] == "1"


async def test_a_body_over_the_limit_is_not_read(c: Cluster) -> None:
    response = await c.complete("x" * 3_000_000)
    assert check(response, 413)["message"] == "The body is over the limit of 2000000 bytes."
    assert response.headers["connection"] == "close"

    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 100_000

    check(await c.client.post("/v1/completions", content=endless(), headers=JSON), 413)
    assert (await c.complete()).status_code == 200


async def test_bodies_are_bounded_together_as_well(tmp_path: Path) -> None:
    limits = {"max_body_bytes": 2_000_000, "max_held_body_bytes": 2_000_000}
    async with cluster(tmp_path, body_timeout=10, **limits) as c:
        arrival, release = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            yield b" " * 1_500_000
            arrival.set()
            await release.wait()
            yield b'{"prompt": "x"}'

        first = asyncio.create_task(c.client.post("/v1/completions", content=slow(), headers=JSON))
        await arrival.wait()
        while c.router.app.handler.bodies.used < 1_500_000:  # noqa: ASYNC110 - a count, no event
            await asyncio.sleep(0.01)
        first_response = await c.complete("x" * 1_000_000)
        assert check(first_response, 503)["code"] == "overloaded"
        assert first_response.headers["retry-after"] == "1"
        assert (await c.complete("hi")).status_code == 200
        release.set()
        assert (await first).status_code == 200
        assert c.router.app.handler.bodies.used == 0


async def test_a_slow_body_frees_its_slot(c: Cluster) -> None:
    async def slow() -> Any:
        yield b'{"prompt":'
        await asyncio.sleep(1.5)
        yield b'"x"}'

    check(await c.client.post("/v1/completions", content=slow(), headers=JSON), 408)


async def _raw(c: Cluster, data: bytes, timeout: float = 3.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
    writer.write(data)
    try:
        async with asyncio.timeout(timeout):
            return await reader.read()
    finally:
        writer.close()


async def test_heads_that_are_too_large_garbled_or_slow(tmp_path: Path) -> None:
    async with cluster(tmp_path, header_timeout=0.5, max_header_bytes=4096) as c:
        many = b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(1000))
        one = b"GET /health HTTP/1.1\r\nlong: " + b"x" * 100_000
        url = b"GET /" + b"x" * 100_000
        for data in (many + b"\r\n", one, url, one + b"\r\n\r\n"):
            response = await _raw(c, data)
            assert response.startswith(b"HTTP/1.1 431"), response[:80]
            json.loads(response.partition(b"\r\n\r\n")[2])["error"]
        response = await _raw(c, b"\x16\x03\x01 garbage\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 400")
        assert (await _raw(c, b"GET /hea")).startswith(b"HTTP/1.1 408")
        assert await _raw(c, b"") == b""
        # A large body does not count as headers, even in the same segment.
        body = json.dumps({"prompt": "x", "stop": ["y" * 1000] * 60}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
        end = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert (await _raw(c, head + end + body)).startswith(b"HTTP/1.1 200")


async def test_garbled_requests_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as c:
        for _ in range(20):
            await _raw(c, b"\x16\x03\x01 garbage\r\n\r\n")
    messages = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert messages.count("Invalid HTTP request received.") == 1
    assert len(messages) < 20


@pytest.mark.parametrize("rest", [b"\r\n", b"a"], ids=["line-ends", "rest-of-a-body"])
async def test_bytes_after_a_response_do_not_keep_a_connection(tmp_path: Path, rest: bytes) -> None:
    """Otherwise clients without a key could exhaust the router's connections."""
    head = b"POST /nowhere HTTP/1.1\r\ncontent-length: 1000\r\n\r\n"
    if rest == b"\r\n":
        head = b"GET /health HTTP/1.1\r\n\r\n"
    async with cluster(tmp_path, api_key="secret", header_timeout=0.5) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        writer.write(head)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
        writer.write(rest)
        async with asyncio.timeout(10):
            while await reader.read(65536):
                pass
        writer.close()


async def test_a_connection_is_used_again_after_line_ends_and_unread_bodies(
    tmp_path: Path,
) -> None:
    lost = b"POST /nowhere HTTP/1.1\r\ncontent-length: 3\r\n\r\n"
    async with cluster(tmp_path) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        for part in (lost, b"abc\r\n" + lost, b"abc\r\n\r\n" + lost):
            writer.write(part)
            response = await reader.readuntil(b"\r\n\r\n")
            assert response.startswith(b"HTTP/1.1 404")
            length = int(re.search(rb"content-length: (\d+)", response)[1])  # type: ignore[index]
            await reader.readexactly(length)
        writer.close()


async def test_every_route_but_health_and_metrics_requires_a_key(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret,other") as c:
        for path in ("/live", "/health", "/ready", "/"):
            assert (await c.client.get(path)).status_code == 200
        for path in (
            "/cluster/state",
            "/docs",
            "/version",
            "/v1/models",
            "/v1/models/tiny",
            "/nowhere",
        ):
            for key in (None, "", "wrong", "Secret", "x" * 10_000, "sécret"):
                headers = (
                    [] if key is None else [(b"authorization", f"Bearer {key}".strip().encode())]
                )
                response = await c.client.get(path, headers=headers)
                error = check(response, 401)
                assert error["code"] == "invalid_api_key"
                missing = "You did not provide an API key."
                assert error["message"] == ("Incorrect API key provided." if key else missing)
                scheme = "Basic" if path == "/docs" else "Bearer"
                assert response.headers["www-authenticate"] == f'{scheme} realm="tandem"'
        for scheme in ("Digest secret", "Basic !"):
            response = await c.client.get("/version", headers={"authorization": scheme})
            assert check(response, 401)["message"] == "You did not provide an API key."
        hidden = check(await c.client.get("/metrics"), 404)
        assert hidden["message"].startswith("Metrics are not on this port;")
        check(await c.client.delete("/version"), 401)
        check(await c.complete(), 401)
        for key in ("secret", "other"):
            headers = [(b"authorization", f"Bearer {key}".encode())]
            assert (await c.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await c.client.get("/docs", auth=("anyone", "secret"))).status_code == 200
