"""Requests that offer to upgrade to another protocol are served as if they did not, and nothing of
their body is taken for a request."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.support import Cluster, cluster

HI = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 3},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False},
    "/tokenize": {"prompt": "hi"},
    "/nowhere": {},
}
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "TLS": b"Upgrade: TLS/1.0\r\nConnection: upgrade\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n",
    "two": b"Connection: Upgrade\r\nUpgrade: h2c\r\nupgrade: TLS/1.3\r\n",
}
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
VARYING = re.compile(
    rb'"(id|created\w*|total_duration|\w+_duration|completed_at)":("[^"]*"|[\d.]+)'
)


def framed(body: bytes, chunked: bool) -> bytes:
    """The rest of a head, and the body."""
    if not chunked:
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    half = len(body) // 2
    parts = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:half], body[half:]) if p)
    return b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"


def post(path: str, body: bytes, offer: bytes = b"", chunked: bool = False) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + offer + framed(body, chunked)


async def exchange(c: Cluster, *packets: bytes) -> bytes:
    """All that comes back until the connection closes, but ids and times, and so lengths."""
    reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0.001 if len(packets) > 1 else 0)  # so that the next is one of its own
    async with asyncio.timeout(10):
        raw = await reader.read()
    writer.close()
    return VARYING.sub(
        rb'"\1":0', re.sub(rb"(?mi)^(date|content-length|(x-)?request-id):.*$", b"", raw)
    )


async def test_an_upgrade_offer_changes_no_response(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for path, fields in ROUTES.items():
            body = json.dumps(fields).encode()
            expected = await exchange(c, post(path, body), LAST)
            assert expected.count(b"HTTP/1.1 ") == 2, (
                "the next request on the connection is served too"
            )
            for offer in OFFERS.values():
                for chunked in (False, True):
                    assert await exchange(c, post(path, body, offer, chunked), LAST) == expected
                    assert await exchange(c, post(path, body, offer, chunked) + LAST) == expected


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_in_any_two_packets(tmp_path: Path, chunked: bool) -> None:
    async with cluster(tmp_path) as c:
        message = post("/tokenize", b'{"prompt":"hi"}', OFFERS["h2c"], chunked) + LAST
        expected = await exchange(c, message)
        assert expected.startswith(b"HTTP/1.1 200") and expected.count(b"HTTP/1.1 ") == 2
        for at in range(1, len(message)):
            assert await exchange(c, message[:at], message[at:]) == expected, message[:at]


async def test_a_body_is_never_a_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for offer in (b"", *OFFERS.values()):
            for chunked in (False, True):
                message = post("/v1/chat/completions", SMUGGLED, offer, chunked)
                for packets in (
                    [message],
                    [message[: -len(SMUGGLED)], message[-len(SMUGGLED) :]],
                ):
                    raw = await exchange(c, *packets, LAST)
                    assert raw.startswith(b"HTTP/1.1 400")
                    assert b'"object":"list"' not in raw
        # Of a request without a body, what follows is the next one.
        request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + OFFERS["websocket"] + b"\r\n"
        assert (await exchange(c, request + LAST)).count(b"HTTP/1.1 200") == 2


UNCLEAR = (
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length : 5\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"X: a\r\n Content-Length: 5\r\n",
    b"X: a\nContent-Length: 5\r\n",
)


async def test_a_length_that_is_not_clear_is_rejected(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for head in UNCLEAR:
            for offer in (b"", OFFERS["h2c"]):
                start = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + offer + head
                raw = await exchange(c, start + b"\r\n0\r\n\r\n" + SMUGGLED)
                assert raw.startswith(b"HTTP/1.1 4"), (head, raw)
                assert raw.count(b"HTTP/1.1 ") == 1 and b'"object":"list"' not in raw, head


async def test_limits_hold_for_requests_with_an_offer(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, max_header_bytes=4096, max_body_bytes=1000, header_timeout=0.5
    ) as c:
        offer = OFFERS["h2c"]
        assert (await exchange(c, post("/tokenize", b"x" * 1001, offer))).startswith(
            b"HTTP/1.1 413"
        )
        large = offer + b"long: " + b"x" * 5000 + b"\r\n"
        assert (await exchange(c, post("/tokenize", b"{}", large))).startswith(b"HTTP/1.1 431")
        assert (await exchange(c, b"GET / HTTP/1.1\r\n" + offer)).startswith(b"HTTP/1.1 408")
        expecting = post("/tokenize", b'{"prompt":"hi"}', offer + b"Expect: 100-continue\r\n")
        raw = await exchange(c, expecting + LAST)
        assert raw.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        for target in (b"example.com:443", b"/tokenize"):
            tunnel = b"CONNECT %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target
            raw = await exchange(c, tunnel + SMUGGLED)
            assert raw.startswith(b"HTTP/1.1 405") and raw.count(b"HTTP/1.1 ") == 1


async def test_encoded_bodies_are_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, batch_dir=str(tmp_path / "state")) as c:
        bodies = {path: json.dumps(body) for path, body in ROUTES.items() if path != "/nowhere"}
        headers = {"content-type": "application/json"}
        for encoding in ("gzip", "deflate", "br", "zstd", "GZIP", "x-unknown", "gzip, br"):
            encoded = headers | {"content-encoding": encoding}
            for path, body in bodies.items():
                response = await c.client.post(path, content=body, headers=encoded)
                assert response.status_code == 415, (path, encoding)
                assert response.headers["accept-encoding"] == "identity"
                assert repr(encoding.lower()) in response.text
            files: Any = {"file": ("a.jsonl", b"{}"), "purpose": (None, "batch")}
            encoded = {"content-encoding": encoding}
            upload = await c.client.post("/v1/files", files=files, headers=encoded)
            assert upload.status_code == 415, encoding
        plain = headers | {"content-encoding": "identity"}
        response = await c.client.post("/tokenize", content=bodies["/tokenize"], headers=plain)
        assert response.status_code == 200


async def test_bodies_that_are_encoded_for_their_way_are_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        coded = b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
        raw = await exchange(c, head + coded)
        assert raw.startswith(b"HTTP/1.1 501") and b"'gzip, chunked'" in raw


async def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for filler in ("", " " * 200_000):  # parsed in C, and in Python
            body = f'\ufeff{{"prompt":"hi"}}{filler}'.encode()
            response = await c.client.post(
                "/tokenize", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 200, response.text
        for codec in ("utf-16", "utf-32", "utf-16-le"):
            response = await c.client.post(
                "/tokenize",
                content='{"prompt":"hi"}'.encode(codec),
                headers={"content-type": "application/json"},
            )
            assert response.status_code == 400
