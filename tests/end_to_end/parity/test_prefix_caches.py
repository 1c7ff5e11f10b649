"""Invariant 1 where only one side of a handoff remembers a prompt, and where neither does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    CHUNK,
    Part,
    TestCluster,
    node_metric,
    running,
)

FORGETFUL = "--no-enable-prefix-caching"
LENGTHS = (BLOCK, CHUNK + 1, 300)
SEEDED = {"temperature": 1.0, "seed": 9, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
STEPS = "tandem_engine_steps_total"


def choices(cluster: TestCluster, tokens: list[int], n: int) -> tuple[list[Any], dict[str, Any]]:
    """The drawn tokens with logprobs, and where the prompt came from by the usage."""
    body = cluster.complete(tokens, n=n, return_token_ids=True, **SEEDED)
    outputs = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in body["choices"]]
    account = {
        "cached": body["usage"]["prompt_tokens_details"]["cached_tokens"],
        "remote": body["tandem"]["remote_tokens"],
    }
    return outputs, account


def check(cluster: TestCluster, reference: TestCluster, n: int) -> list[list[dict[str, Any]]]:
    """Send each prompt twice and compare every output with the reference. Returns the token
    counts."""
    accounts = []
    for length in LENGTHS:
        tokens = prompt(10 * n + length, length)
        want, _ = choices(reference, tokens, n)
        counts = []
        for _ in range(2):
            outputs, account = choices(cluster, tokens, n)
            assert [ids for ids, _ in outputs] == [ids for ids, _ in want]
            for (_, logprobs), (_, expected) in zip(outputs, want, strict=True):
                assert logprobs == pytest.approx(expected, abs=1e-4)
            counts.append(account)
        accounts.append(counts)
    return accounts


def replace(cluster: TestCluster, old: Part, *new: str) -> Part:
    old.process.send_signal(signal.SIGTERM)
    assert old.process.wait(20) == 0
    return cluster.start_node(*new)


def test_each_side_may_hold_the_prefix_that_the_other_lacks(
    tmp_path: Path, tiny_model: str, aggregated: TestCluster
) -> None:
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        prefill, decode = cluster.start_nodes(("prefill-node",), ("decode-node", FORGETFUL))
        cluster.wait_nodes(decode=1, prefill=1)

        # The prefill side alone: everything travels twice, and is computed once.
        for length, (first, second) in zip(LENGTHS, check(cluster, aggregated, 1), strict=True):
            assert first == {"cached": 0, "remote": length - 1}
            assert second == first | {"cached": (length - 2) // BLOCK * BLOCK}
        tokens = prompt(5, 400)
        before = node_metric(prefill, STEPS)
        choices(cluster, tokens, 1)
        computed = node_metric(prefill, STEPS) - before
        choices(cluster, tokens, 1)
        assert node_metric(prefill, STEPS) - before - computed < computed

        # Neither side, and several choices, which share their prompt's blocks all the same.
        prefill = replace(cluster, prefill, "prefill-node", FORGETFUL)
        cluster.wait_nodes(decode=1, prefill=1)
        for length, (first, second) in zip(LENGTHS, check(cluster, aggregated, 3), strict=True):
            assert first == second == {"cached": 0, "remote": length - 1}

        # The decode side alone: the second time only what no full block holds travels.
        decode = replace(cluster, decode, "decode-node")
        cluster.wait_nodes(decode=1, prefill=1)
        for length, (first, second) in zip(LENGTHS, check(cluster, aggregated, 2), strict=True):
            cached = (length - 1) // BLOCK * BLOCK
            assert first == {"cached": 0, "remote": length - 1}
            assert second == {"cached": cached, "remote": length - 1 - cached}
        cluster.wait_idle(prefill, decode)
