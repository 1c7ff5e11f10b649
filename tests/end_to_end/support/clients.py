"""Clients of a running cluster, on bare sockets: what they send and when they read is theirs."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Callable
from typing import Any

from tandem.tests.end_to_end.support.cluster import TestCluster
from tandem.tests.support.checkpoints.tiny_models import VOCAB

COMPLETIONS = "/v1/completions"


def prompt(seed: int, length: int = 480) -> list[int]:
    """Random tokens; the default length is near the context's end."""
    draw = random.Random(seed)
    return [draw.randrange(VOCAB - 10) for _ in range(length)]


def greedy(cluster: TestCluster, seed: int, count: int = 6) -> list[int]:
    """The tokens that must never change."""
    body = cluster.complete(
        prompt(seed), max_tokens=count, temperature=0, ignore_eos=True, return_token_ids=True
    )
    return list(body["choices"][0]["token_ids"])


def open_request(cluster: TestCluster, tokens: list[int], **fields: Any) -> Any:
    """A sent request whose response is not read yet."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=60)
    body = {"prompt": tokens, "ignore_eos": True, **fields}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    return connection


def stream_lines(
    cluster: TestCluster,
    tokens: list[int],
    after_first: Callable[[], Any] = lambda: None,
    **fields: Any,
) -> list[str]:
    """The non-empty lines of a stream; ``after_first`` runs once tokens flow."""
    connection = open_request(cluster, tokens, stream=True, **fields)
    lines: list[str] = []
    try:
        response = connection.getresponse()
        assert response.status == 200
        for raw in response:
            line = raw.decode().strip()
            if line:
                lines.append(line)
                if len(lines) == 2:
                    threading.Thread(target=after_first).start()
    finally:
        connection.close()
    return lines


def streamed_tokens(cluster: TestCluster, seed: int, count: int) -> list[int]:
    """The tokens of one choice; asserts that the stream ended well."""
    lines = stream_lines(
        cluster, prompt(seed, 40), max_tokens=count, temperature=0, return_token_ids=True
    )
    assert lines[-1] == "data: [DONE]", lines[-1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
