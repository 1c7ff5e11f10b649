"""One client's nonsense or sloth is its own: the streams of others go on with the same tokens, and
no process grows."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tandem.tests.end_to_end.support.clients import COMPLETIONS, streamed_tokens
from tandem.tests.end_to_end.support.cluster import (
    CONTEXT,
    TestCluster,
    get,
    metric,
    node_metric,
    until,
)

MIB = 1 << 20
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
SEEDS = (1, 2, 3)
TOKENS = 300

BAD: dict[str, tuple[str, Any, int]] = {
    "over-long prompt": (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}, 400),
    "over-long text": (COMPLETIONS, {"prompt": "x" * MIB}, 400),
    "over-long chat": (CHAT, {"messages": [{"role": "user", "content": "x" * MIB}]}, 400),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, 400),
    "empty list": (COMPLETIONS, {"prompt": []}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "token beyond the vocabulary": (COMPLETIONS, {"prompt": [512]}, 400),
    "negative token": (COMPLETIONS, {"prompt": [-1]}, 400),
    "huge token": (COMPLETIONS, {"prompt": [2**70]}, 400),
    "NaN": (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
    "Infinity": (COMPLETIONS, b'{"prompt": "x", "top_p": Infinity}', 400),
    "overflowing number": (COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', 400),
    "temperature": (CHAT, {"messages": HELLO, "temperature": 2.5}, 400),
    "top_p": (CHAT, {"messages": HELLO, "top_p": -1}, 400),
    "seed": (CHAT, {"messages": HELLO, "seed": 2**64}, 400),
    "a million choices": (CHAT, {"messages": HELLO, "n": 1_000_000}, 400),
    "max_tokens": (CHAT, {"messages": HELLO, "max_tokens": 10**9}, 400),
    "truncated JSON": (COMPLETIONS, b'{"prompt": "x', 400),
    "no JSON": (CHAT, b"hello", 400),
    "nested JSON": (CHAT, b"[" * 200_000, 400),
    "empty body": (CHAT, b"", 400),
    "not an object": (CHAT, b"[1]", 400),
    "wrong type": (CHAT, {"messages": "hi"}, 400),
    "wrong type of number": (CHAT, {"messages": HELLO, "max_tokens": "ten"}, 400),
    "unsupported parameter": (CHAT, {"messages": HELLO, "web_search_options": {}}, 400),
    "a hundred thousand prompts": (COMPLETIONS, {"prompt": ["x"] * 100_000}, 400),
    "body over the limit": (COMPLETIONS, b" " * (33 * MIB), 413),
}


# The same on surfaces with errors of their own.
NESTED = b'{"model": "qwen3", "x": ' + b"[" * 200_000
LARGE = "x" * (600 * 1024)
MESSAGE = {"model": "qwen3", "max_tokens": 5, "messages": HELLO}
OLLAMA = {"model": "qwen3", "messages": HELLO}
OTHER_BAD: dict[str, tuple[str, Any, int]] = {
    "messages: over-long": ("/v1/messages", MESSAGE | {"system": "x" * MIB}, 400),
    "messages: nested": ("/v1/messages", NESTED, 400),
    "count_tokens: none": ("/v1/messages/count_tokens", {"model": "qwen3", "messages": []}, 400),
    "responses: nested": ("/v1/responses", NESTED, 400),
    "responses: many items": (
        "/v1/responses",
        {"input": [{"type": "mcp_list_tools"}] * 16_385},
        400,
    ),
    "responses: large value": ("/v1/responses", {"input": "hi", "tool_choice": {"x": LARGE}}, 400),
    "responses: unknown": ("/v1/responses", {"input": "hi", "previous_response_id": "x"}, 404),
    "input_tokens: nested": ("/v1/responses/input_tokens", NESTED, 400),
    "ollama chat: over-long": (
        "/api/chat",
        OLLAMA | {"format": {"enum": list(range(140_000))}},
        400,
    ),
    "ollama generate: nested": ("/api/generate", NESTED, 400),
    "ollama embed: empty": ("/api/embed", {"model": "qwen3", "input": []}, 400),
    "embeddings: over-long": ("/v1/embeddings", {"input": [[1] * (CONTEXT + 1)]}, 400),
    "tokenize: nested": ("/tokenize", NESTED, 400),
    "detokenize: beyond the vocabulary": ("/detokenize", {"tokens": [2**40]}, 400),
    "regex": (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "(" * 5000}}, 400),
    "grammar": (COMPLETIONS, {"prompt": "x", "structured_outputs": {"grammar": "start: x"}}, 400),
    "beams": (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 33}, 400),
    "batch without a file": (
        "/v1/batches",
        {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"},
        404,
    ),
    "long query": ("/v1/responses?" + "a=&" * 3000, {"input": "hi"}, 414),
}


def memory(cluster: TestCluster) -> int:
    """Bytes of all processes of the cluster."""
    roots = [psutil.Process(part.process.pid) for part in cluster.parts]
    everyone = [process for root in roots for process in (root, *root.children(recursive=True))]
    return sum(process.memory_info().rss for process in everyone)


@pytest.fixture(scope="module")
def undisturbed(aggregated: TestCluster) -> list[list[int]]:
    """The bystanders' outputs when they run alone."""
    return [streamed_tokens(aggregated, seed, TOKENS) for seed in SEEDS]


@contextmanager
def bystanders(cluster: TestCluster, want: list[list[int]]) -> Iterator[None]:
    """Streams that run meanwhile, and must say what they say undisturbed. It is entered when all
    have begun."""
    _, decode = cluster.parts[1:]
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        streams = [pool.submit(streamed_tokens, cluster, seed, TOKENS) for seed in SEEDS]
        running = "tandem_sequences_running"
        until(lambda: node_metric(decode, running) >= len(SEEDS), "the bystanders to run")
        yield
        assert [stream.result() for stream in streams] == want
    assert all(len(tokens) == TOKENS for tokens in want)


# What clients do does not depend on how KV moves.
@pytest.mark.parametrize("disaggregated", ["shared_memory"], indirect=True)
def test_bad_requests_are_refused_while_others_stream(
    disaggregated: TestCluster, undisturbed: list[list[int]]
) -> None:
    def refuse_all() -> None:
        for case, (path, body, status) in BAD.items():
            code, response = disaggregated.post(path, body)
            assert code == status, (case, response)
            assert set(response) == {"error"}, case
            error = response["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert error["type"] == "invalid_request_error" and error["message"], case
        for case, (path, body, status) in OTHER_BAD.items():
            code, response = disaggregated.post(path, body)
            assert code == status and "error" in response, (case, response)
            assert len(str(response)) < 1500, case

    # The first round is what allocators keep of any busy moment.
    memories = []
    for _ in range(2):
        with bystanders(disaggregated, undisturbed):
            refuse_all()
        memories.append(memory(disaggregated))
    assert memories[1] - memories[0] < 48 * MIB
    disaggregated.wait_idle(*disaggregated.parts[1:])


SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(50)}}


# Responses with logprobs of all kinds at their maximum size, and bodies that are slow to parse.
HEAVY: dict[str, tuple[str, Any, int]] = {
    "logprobs": (
        CHAT,
        {"messages": HELLO, "n": 16, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
        | {"ignore_eos": True},
        200,
    ),
    "prompt logprobs": (
        COMPLETIONS,
        {"prompt": [[5] * 500] * 24, "max_tokens": 1, "prompt_logprobs": 20},
        200,
    ),
    "echo": (
        COMPLETIONS,
        {"prompt": [[5] * 500] * 16, "n": 8, "max_tokens": 1, "echo": True, "logprobs": 5}
        | {"return_token_ids": True},
        200,
    ),
    # More than run at once, so that most are held while they wait.
    "held prompts": (COMPLETIONS, {"prompt": [[5] * 500] * 64, "max_tokens": 4}, 200),
    "out of all proportion": (
        COMPLETIONS,
        {"prompt": ["x"] * 512, "n": 8, "max_tokens": 400, "logprobs": 20},
        400,
    ),
    "many messages": (CHAT, {"messages": HELLO * 16_000}, 400),
    "large values": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": "y\n" * MIB}}, 400),
    "much text": (COMPLETIONS, {"prompt": "wor \n" * MIB}, 400),
    "white space": (COMPLETIONS, b'{"prompt": ' + b" " * 7 * MIB + b'"x", "max_tokens": 1}', 200),
    "one string": (COMPLETIONS, {"prompt": "wor " * MIB}, 400),
    "responses": (
        "/v1/responses",
        {"input": HELLO, "max_output_tokens": 200, "ignore_eos": True}
        | {"top_logprobs": 20, "include": ["message.output_text.logprobs"]},
        200,
    ),
    "input tokens": ("/v1/responses/input_tokens", {"input": "wor " * 20_000}, 200),
    "messages": ("/v1/messages", MESSAGE | {"max_tokens": 200}, 200),
    "count tokens": (
        "/v1/messages/count_tokens",
        {"model": "qwen3", "messages": [{"role": "user", "content": "wor " * 20_000}]},
        200,
    ),
    "ollama": ("/api/chat", OLLAMA | {"stream": False, "options": {"num_predict": 200}}, 200),
    "ollama embed": ("/api/embed", {"model": "qwen3", "input": ["wor " * 100] * 64}, 200),
    "embeddings": ("/v1/embeddings", {"input": [[5] * 400] * 64}, 200),
    "tokenize": ("/tokenize", {"prompt": "wor " * 200_000, "return_token_strs": True}, 400),
    "detokenize": ("/detokenize", {"tokens": [5] * 100_000}, 200),
    "beams": (
        COMPLETIONS,
        {"prompt": "x", "use_beam_search": True, "n": 8, "max_tokens": 4, "temperature": 0}
        | {"stop_token_ids": list(range(250))},
        200,
    ),
    "a schema": (
        CHAT,
        {"messages": HELLO, "max_tokens": 8}
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        200,
    ),
}
# What the router may do at once is asserted in its own tests. Here all parts share two cores,
# perhaps with other tests, so only a standstill can be distinguished.
LATE_SECONDS = 10.0
SCRAPES = 8
ASK_PAUSE_SECONDS = 0.2


def scrape(cluster: TestCluster) -> None:
    """The router's page of metrics, several times at once."""
    with ThreadPoolExecutor(SCRAPES) as pool:
        pages = list(pool.map(get, [f"{cluster.url}/metrics"] * SCRAPES))
    assert all("tandem_router_prompts_total" in page for page in pages)


@contextmanager
def always_alive(cluster: TestCluster) -> Iterator[None]:
    """Requests the router continuously, and fails if a response was late."""
    done, latest = threading.Event(), 0.0

    def ask() -> None:
        nonlocal latest
        while not done.is_set():
            start = time.monotonic()
            get(f"{cluster.url}/live")
            latest = max(latest, time.monotonic() - start)
            done.wait(ASK_PAUSE_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            done.set()
        asking.result()
    assert latest < LATE_SECONDS


@pytest.mark.parametrize("disaggregated", ["shared_memory"], indirect=True)
def test_heavy_requests_delay_no_other(
    disaggregated: TestCluster, undisturbed: list[list[int]]
) -> None:
    unexpected = {}
    with bystanders(disaggregated, undisturbed), always_alive(disaggregated):
        for case, (path, body, status) in HEAVY.items():
            code, response = disaggregated.post(path, body)
            if code != status:
                unexpected[case] = response
            scrape(disaggregated)
    assert unexpected == {}
    disaggregated.wait_idle(*disaggregated.parts[1:])


def open_and_stall(cluster: TestCluster) -> socket.socket:
    """A client that asks for megabytes of events, and reads none of them."""
    body = {
        "messages": HELLO,
        "stream": True,
        "ignore_eos": True,
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
    }
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before connect, to have effect
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    sock.connect((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


# What clients do does not depend on how KV moves.
@pytest.mark.parametrize("disaggregated", ["shared_memory"], indirect=True)
def test_a_client_that_reads_nothing_delays_no_other(
    disaggregated: TestCluster, undisturbed: list[list[int]]
) -> None:
    _, decode = disaggregated.parts[1:]

    def in_progress() -> float:
        name = 'vllm:num_requests_running{engine="0",model_name="qwen3"}'
        return metric(get(f"{disaggregated.url}/metrics"), name)

    with bystanders(disaggregated, undisturbed):
        before = memory(disaggregated)
        stalled = open_and_stall(disaggregated)
    try:
        until(lambda: node_metric(decode, "tandem_sequences_running") == 0, "the node to finish")
        assert in_progress() == 1, "the events fitted into the sockets' buffers"
        with bystanders(disaggregated, undisturbed):
            pass
        assert memory(disaggregated) - before < 64 * MIB
    finally:
        stalled.close()
    until(lambda: in_progress() == 0, "the router to notice that the client has gone")
    disaggregated.wait_idle(*disaggregated.parts[1:])
