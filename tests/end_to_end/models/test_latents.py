"""Models with latent attention over two nodes: what travels is the latents, once for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    committed_transfers,
    node_metric,
    running,
    until,
)
from tandem.tests.end_to_end.support.ensemble import Ensemble, side
from tandem.tests.support.checkpoints import tiny_models

OUTPUT = 8
LAYERS, LATENT = 3, 48 + 8
BYTES = "tandem_transfer_bytes_total"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def reference(models: Path) -> Callable[[list[int]], list[int]]:
    """The tokens of transformers for a prompt."""
    folder = tiny_models.cached("deepseek_v3", models)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def greedy(tokens: list[int]) -> list[int]:
        with torch.inference_mode():
            outputs = model.generate(
                torch.tensor([tokens]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None
            )
        return list(outputs[0, len(tokens) :].tolist())

    return greedy


@pytest.fixture(scope="module")
def duo(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Ensemble]:
    model = str(tiny_models.cached("deepseek_v3", models))
    with running(tmp_path_factory.mktemp("duo"), model) as cluster:
        yield Ensemble(cluster, {"one": (1, 8), "two": (2, 32)}, [("one", "two")])


def outputs(cluster: TestCluster, batch: list[list[int]]) -> list[list[int]]:
    body = cluster.complete(
        batch, max_tokens=OUTPUT, temperature=0, ignore_eos=True, return_token_ids=True
    )
    return [choice["token_ids"] for choice in body["choices"]]


def moved(tokens: int, ranks: int, itemsize: int) -> int:
    """Bytes of the latents of so many tokens, in every layer, for so many ranks."""
    return tokens * LAYERS * LATENT * itemsize * ranks


@pytest.mark.parametrize(("there", "here"), [("one", "two"), ("two", "one")])
def test_ranks_and_block_sizes_may_differ(
    duo: Ensemble, reference: Callable[[list[int]], list[int]], there: str, here: str
) -> None:
    """Tokens are those of transformers, and only what is missing travels."""
    ranks, block, *_ = duo.kinds[here]
    # What neither node has seen, and then what begins like it, so that both prefix caches have a
    # part in it.
    first = [prompt(1000 * ranks + length, length) for length in (2, 9, 33, 64, 65, 300)]
    second = [tokens + prompt(len(tokens), 40) for tokens in first]
    nodes = duo.cast(there, here)
    prefill, decode = nodes
    committed, byte_counts = (
        committed_transfers(decode),
        [node_metric(node, BYTES) for node in nodes],
    )
    assert outputs(duo.cluster, first) == [reference(tokens) for tokens in first]
    all_of_them = moved(sum(len(tokens) - 1 for tokens in first), ranks, 4)
    wait_for_bytes(nodes, [before + all_of_them for before in byte_counts])
    assert outputs(duo.cluster, second) == [reference(tokens) for tokens in second]
    assert committed_transfers(decode) - committed == len(first + second)
    cached = sum(len(tokens) // block * block for tokens in first)
    missing = moved(sum(len(tokens) - 1 for tokens in second) - cached, ranks, 4)
    wait_for_bytes(nodes, [before + all_of_them + missing for before in byte_counts])
    duo.cluster.wait_idle(prefill, decode)


def wait_for_bytes(nodes: Sequence[Part], expected: Sequence[float]) -> None:
    """Both sides count the same, once the transfers have been settled."""
    for node, count in zip(nodes, expected, strict=True):
        until(lambda node=node, count=count: node_metric(node, BYTES) == count, f"{count} bytes")  # type: ignore[misc]


def test_formats_may_differ(tmp_path: Path, models: Path) -> None:
    """Whole blocks travel in the decode node's format, of one byte, and the canary passes. The
    first token's log-probability differs by no more than rounding makes it."""
    there = side("prefill-node", 2, 8, "--dtype=bfloat16")
    here = side("decode-node", 1, 32, "--kv-cache-dtype=fp8", "--no-enable-prefix-caching")
    lengths = (17, 65, 200)
    batch = [prompt(7 + length, length) for length in lengths]
    fields = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with running(tmp_path, str(tiny_models.cached("deepseek_v3_dense", models))) as cluster:
        cluster.start_router()
        decode = cluster.start_node(*here)
        cluster.wait_nodes(decode=1, prefill=0)
        want = cluster.complete(batch, **fields)["choices"]
        prefill = cluster.start_node(*there)
        cluster.wait_nodes(decode=1, prefill=1)
        choices = cluster.complete(batch, **fields)["choices"]
        for one, other in zip(want, choices, strict=True):
            first, second = (c["logprobs"]["token_logprobs"][0] for c in (one, other))
            assert first == pytest.approx(second, abs=0.5)
        assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
        whole = sum((length - 1) // 32 * 32 for length in lengths)
        wait_for_bytes((prefill, decode), [moved(whole, 1, 1)] * 2)
        cluster.wait_idle(prefill, decode)
