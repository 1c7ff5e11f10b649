"""Models with latent attention over two nodes: what travels is the latents, once for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.tests import tiny_models
from tandem.tests.end_to_end.clients import prompt
from tandem.tests.end_to_end.cluster import TestCluster, node_metric, running, until
from tandem.tests.end_to_end.test_unequal_sides import side

OUTPUT = 8
FIRST = [prompt(length, length) for length in (2, 9, 33, 64, 65, 300)]
# Each begins like one of the first, so that both prefix caches have a part in it.
SECOND = [tokens + prompt(len(tokens), 40) for tokens in FIRST]
LAYERS, LATENT = 3, 48 + 8
BYTES = "tandem_transfer_bytes_total"
COMMITTED = 'tandem_transfers_total{outcome="committed"}'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def expected(models: Path) -> tuple[list[list[int]], list[list[int]]]:
    """What transformers makes of both."""
    torch.set_num_threads(1)
    folder = tiny_models.cached("deepseek_v3", models)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def greedy(tokens: list[int]) -> list[int]:
        with torch.inference_mode():
            drawn = reference.generate(
                torch.tensor([tokens]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None
            )
        return list(drawn[0, len(tokens) :].tolist())

    return [greedy(tokens) for tokens in FIRST], [greedy(tokens) for tokens in SECOND]


def drawn(cluster: TestCluster, batch: list[list[int]]) -> list[list[int]]:
    body = cluster.complete(
        batch, max_tokens=OUTPUT, temperature=0, ignore_eos=True, return_token_ids=True
    )
    return [choice["token_ids"] for choice in body["choices"]]


def moved(tokens: int, ranks: int, itemsize: int) -> int:
    """Bytes of the latents of so many tokens, in every layer, for so many ranks."""
    return tokens * LAYERS * LATENT * itemsize * ranks


@pytest.mark.parametrize(("there", "here"), [((1, 8), (2, 32)), ((4, 64), (1, 16))], ids=str)
def test_ranks_and_block_sizes_may_differ(
    tmp_path: Path,
    models: Path,
    expected: tuple[list[list[int]], list[list[int]]],
    there: tuple[int, int],
    here: tuple[int, int],
) -> None:
    """Tokens are those of transformers, and only what is missing travels."""
    with running(tmp_path, str(tiny_models.cached("deepseek_v3", models))) as cluster:
        cluster.start_router()
        nodes = cluster.start_nodes(side("prefill-node", *there), side("decode-node", *here))
        cluster.wait_nodes(decode=1, prefill=1)
        assert drawn(cluster, FIRST) == expected[0]
        all_of_them = moved(sum(len(tokens) - 1 for tokens in FIRST), here[0], 4)
        wait_for_bytes(nodes, all_of_them)
        assert drawn(cluster, SECOND) == expected[1]
        assert node_metric(nodes[1], COMMITTED) == len(FIRST + SECOND)
        held = sum(len(tokens) // here[1] * here[1] for tokens in FIRST)
        missing = sum(len(tokens) - 1 for tokens in SECOND) - held
        wait_for_bytes(nodes, all_of_them + moved(missing, here[0], 4))
        cluster.wait_idle(*nodes)


def wait_for_bytes(nodes: Sequence[Any], expected: int) -> None:
    """Both sides count the same, once the transfers have been settled."""
    for node in nodes:
        until(lambda node=node: node_metric(node, BYTES) == expected, f"{expected} bytes")  # type: ignore[misc]


def test_formats_may_differ(tmp_path: Path, models: Path) -> None:
    """Latents travel in the decode node's format, of one byte, and the canary passes. The first
    token's log-probability differs by no more than rounding makes it."""
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
        got = cluster.complete(batch, **fields)["choices"]
        for one, other in zip(want, got, strict=True):
            first, second = (c["logprobs"]["token_logprobs"][0] for c in (one, other))
            assert first == pytest.approx(second, abs=0.5)
        assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
        wait_for_bytes((prefill, decode), moved(sum(lengths) - 3, 1, 1))
        cluster.wait_idle(prefill, decode)
