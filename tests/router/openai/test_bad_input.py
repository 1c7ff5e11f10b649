"""Invalid requests: the right status, at once, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.support import CONTEXT, Cluster, cluster, make_model

NAN, INF = float("nan"), float("inf")


def check(response: Any, status: int) -> dict[str, Any]:
    """The error object of an error response."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and "/work" not in response.text
    return body["error"]


def nested(levels: int) -> Any:
    """JSON as deep as Python's parser accepts."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


BAD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "warm"},
    {"temperature": True},
    {"temperature": []},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_k": 2**40},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"seed": 2**63},
    {"seed": -(2**63) - 1},
    {"seed": 1.5},
    {"seed": 10**400},
    {"temperature": 10**400},
    {"n": 0},
    {"n": 1_000_000},
    {"n": "2"},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 10**12},
    {"max_tokens": CONTEXT + 1},
    {"min_tokens": 30, "max_tokens": 20},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"²": 1}},
    {"logit_bias": []},
    {"stop": ""},
    {"stop": [""]},
    {"stop": [1]},
    {"stop": 5},
    {"stop": ["x"] * 1000},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [99999]},
    {"stop_token_ids": "1"},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": 1},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
    {"prompt_logprobs": 99},
    {"priority": 2**31},
    {"cache_salt": 5},
    {"cache_salt": "x" * 10_000},
    {"guided_regex": ["(a+)+"]},
    {"guided_json": 5},
    {"structured_outputs": {}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"best_of": 1, "n": 2},
    {"best_of": 2, "stream": True},
    {"best_of": 10_000},
    {"truncate_prompt_tokens": -2},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": CONTEXT},
    {"truncation_side": "middle"},
]
BAD_CHAT: list[dict[str, Any]] = [
    {"messages": None},
    {"messages": []},
    {"messages": "hi"},
    {"messages": [1]},
    {"messages": [{}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "", "content": "hi"}]},
    {"messages": [{"role": "king" * 64, "content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [{"name": 5}]},
    {"reasoning_effort": 5},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"documents": [{"title": 5}]},
    {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
    {"messages": [{"role": "assistant", "function_call": {"name": 5}}]},
    {"audio": {}},
    {"logprobs": 5},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"max_tokens": 5, "max_completion_tokens": 6},
    {"chat_template": "{{ 1 }}"},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": 3},
    {"chat_template_kwargs": {"x": nested(70)}},
    {"chat_template_kwargs": {"x": nested(900)}},
    {"messages": [{"role": "user", "content": [{"type": nested(900)}]}]},
    {"thinking_token_budget": 5},
    {"thinking_token_budget": -2},
    {"thinking_token_budget": "5"},
    {"model": 5},
]
BAD_COMPLETION: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [""]},
    {"prompt": [[]]},
    {"prompt": 5},
    {"prompt": {"a": 1}},
    {"prompt": [1, "a"]},
    {"prompt": ["a", 1]},
    {"prompt": [True]},
    {"prompt": [-1]},
    {"prompt": [320]},
    {"prompt": [1.5]},
    {"prompt": [[1], [10**30]]},
    {"prompt": [1] * (CONTEXT + 1)},
    {"prompt": [1] * CONTEXT},
    {"prompt": "word " * 2000},
    {"prompt": ["x"] * 100_000},
    {"prompt": ["x"] * 1000, "n": 100},
    {"suffix": "x"},
    {"suffix": 5},
    {"thinking_token_budget": 5},
    {"best_of": 129},
    {"logprobs": True},
    {"logprobs": 21},
    {"echo": 1},
    {"prompt": [1] * 400, "max_tokens": 1, "n": 128, "prompt_logprobs": 20},
    {"prompt": [1] * 100, "max_tokens": 400, "n": 128, "logprobs": 20},
    {"prompt": ["x"] * 512, "max_tokens": 500, "n": 8, "logprobs": 0},
    {
        "prompt": [[1] * 510] * 700,
        "max_tokens": 1,
        "n": 5,
        "stream": True,
        "echo": True,
        "logprobs": 1,
    },
    {"prompt": [1] * 400, "max_tokens": 1, "n": 128, "echo": True, "logprobs": 20},
    {"prompt": [[1] * 500] * 100, "max_tokens": 1, "prompt_logprobs": 20},
]


@pytest.fixture
async def c(tmp_path: Path) -> Any:
    async with cluster(tmp_path, max_body_bytes=2_000_000, body_timeout=0.5) as running:
        yield running


async def test_parameters_out_of_range_or_of_the_wrong_type(c: Cluster) -> None:
    for fields in BAD_SAMPLING:
        error = check(await c.chat(**fields), 400)
        assert error["type"] == "invalid_request_error", fields
        check(await c.complete(**fields), 400)
    assert not c.node.requests
    assert (await c.chat()).status_code == 200


async def test_chats_that_make_no_sense(c: Cluster) -> None:
    for fields in BAD_CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}]} | fields
        check(await c.client.post("/v1/chat/completions", json=body), 400)
    assert not c.node.requests


async def test_completions_that_make_no_sense(c: Cluster) -> None:
    for fields in BAD_COMPLETION:
        body = {"prompt": "hi"} | fields
        check(await c.client.post("/v1/completions", json=body), 400)
    assert not c.node.requests


async def test_the_context_limit_names_both_numbers(c: Cluster) -> None:
    error = check(await c.complete([1] * 500, max_tokens=100), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"] and "600" in error["message"]
    error = check(await c.chat("word " * 2000), 400)
    assert error["code"] == "context_length_exceeded"
    assert (await c.complete([1] * (CONTEXT - 1))).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    ],
)
async def test_bodies_that_are_not_json(c: Cluster, body: bytes) -> None:
    kind = {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        check(await c.client.post(path, content=body, headers=kind), 400)


async def test_wrong_routes_methods_and_types(c: Cluster) -> None:
    check(await c.client.get("/nowhere"), 404)
    check(await c.client.post("/v1/nowhere", json={}), 404)
    assert check(await c.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    response = await c.client.get("/v1/completions")
    check(response, 405)
    assert response.headers["allow"] == "POST"
    check(await c.client.delete("/health"), 405)
    check(await c.client.post("/v1/completions", content=b"{}"), 415)
    check(await c.complete(model="other"), 404)
    assert (await c.client.get("/v1/models/tiny")).json()["id"] == "tiny"


async def test_a_body_over_the_limit_is_not_read(c: Cluster) -> None:
    check(await c.complete("x" * 3_000_000), 413)

    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 100_000

    kind = {"content-type": "application/json"}
    check(await c.client.post("/v1/completions", content=endless(), headers=kind), 413)
    assert (await c.complete()).status_code == 200


async def test_bodies_are_bounded_together_as_well(tmp_path: Path) -> None:
    kind = {"content-type": "application/json"}
    limits = {"max_body_bytes": 2_000_000, "max_held_body_bytes": 2_000_000}
    async with cluster(tmp_path, body_timeout=10, **limits) as c:
        arrived, release = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            yield b" " * 1_500_000
            arrived.set()
            await release.wait()
            yield b'{"prompt": "x"}'

        first = asyncio.create_task(c.client.post("/v1/completions", content=slow(), headers=kind))
        await arrived.wait()
        while c.router.app.handler.bodies.held < 1_500_000:  # noqa: ASYNC110 - a count, no event
            await asyncio.sleep(0.01)
        refused = await c.complete("x" * 1_000_000)
        assert check(refused, 503)["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert (await c.complete("hi")).status_code == 200
        release.set()
        assert (await first).status_code == 200
        assert c.router.app.handler.bodies.held == 0


async def test_a_slow_body_frees_its_slot(c: Cluster) -> None:
    async def slow() -> Any:
        yield b'{"prompt":'
        await asyncio.sleep(1.5)
        yield b'"x"}'

    kind = {"content-type": "application/json"}
    check(await c.client.post("/v1/completions", content=slow(), headers=kind), 408)


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
            answer = await _raw(c, data)
            assert answer.startswith(b"HTTP/1.1 431"), answer[:80]
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        answer = await _raw(c, b"\x16\x03\x01 garbage\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert (await _raw(c, b"GET /hea")).startswith(b"HTTP/1.1 408")
        assert await _raw(c, b"") == b""
        # A large body is no head, also when it comes in the same segment.
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
            await _raw(c, b"GET /health HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    told = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert told.count("Invalid HTTP request received.") == 1
    assert told.count("Unsupported upgrade request.") == 1 and len(told) < 20


@pytest.mark.parametrize("rest", [b"\r\n", b"a"], ids=["line-ends", "rest-of-a-body"])
async def test_what_comes_after_an_answer_does_not_keep_a_connection(
    tmp_path: Path, rest: bytes
) -> None:
    """Otherwise thousands of such connections, without any key, could use up the router's."""
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
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 404")
            length = int(re.search(rb"content-length: (\d+)", answer)[1])  # type: ignore[index]
            await reader.readexactly(length)
        writer.close()


async def test_keys_are_asked_for_on_every_route_but_those_of_machines(tmp_path: Path) -> None:
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
                assert check(response, 401)["code"] == "invalid_api_key"
        check(await c.complete(), 401)
        for key in ("secret", "other"):
            headers = [(b"authorization", f"Bearer {key}".encode())]
            assert (await c.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await c.client.get("/docs", auth=("anyone", "secret"))).status_code == 200


async def test_a_template_that_refuses_or_runs_away_is_the_requests_error(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) "
        "%}{% endfor %}{% endfor %}{% elif messages[0].content == 'reach' %}"
        "{{ ''.__class__.__mro__ }}{% else %}{{ raise_exception('users only') }}{% endif %}"
    )
    make_model(tmp_path / "model", template)
    async with cluster(tmp_path) as c:
        assert "users only" in check(await c.chat("x"), 400)["message"]
        check(await c.chat("loop"), 400)
        check(await c.chat("reach"), 400)


async def test_no_template_sends_the_client_to_completions(tmp_path: Path) -> None:
    make_model(tmp_path / "model", None)
    async with cluster(tmp_path) as c:
        assert "/v1/completions" in check(await c.chat("x"), 400)["message"]
        assert (await c.complete("x")).status_code == 200


async def test_the_models_own_defaults_are_used(tmp_path: Path) -> None:
    make_model(tmp_path / "model", temperature=0.25, top_k=7)
    async with cluster(tmp_path) as c:
        await c.complete("x")
        await c.complete("x", temperature=1, top_k=0)
        first, second = (request.sampling for request in c.node.requests)
        assert (first.temperature, first.top_k) == (0.25, 7)
        assert (second.temperature, second.top_k) == (1, 0)


async def test_a_hopeless_prompt_is_not_even_encoded(c: Cluster) -> None:
    for answer in (await c.complete("a" * 1_900_000), await c.chat("a" * 1_900_000)):
        error = check(answer, 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"] and " 19000" in error["message"]


async def test_all_that_a_template_may_show_counts(c: Cluster) -> None:
    long = "a" * 1_000_000
    hello = {"role": "user", "content": "hi"}
    for body in (
        {"messages": [hello | {"name": long}]},
        {"messages": [hello | {"reasoning_content": long}]},
        {"messages": [hello], "chat_template_kwargs": {"x": {"y": [long]}}},
        {"messages": [hello], "chat_template_kwargs": {long: 1}},
    ):
        error = check(await c.client.post("/v1/chat/completions", json=body), 400)
        assert error["code"] == "context_length_exceeded", body.keys()
    assert not c.node.requests


async def test_the_tokenizer_for_quoted_control_tokens_exists_from_the_start(c: Cluster) -> None:
    """A second tokenizer reads it as text, and takes a while to create."""
    assert c.router.registry.model().tokenizer._literal is not None
