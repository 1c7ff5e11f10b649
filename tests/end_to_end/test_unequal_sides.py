"""Nodes that differ in what they need not agree on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, permutations
from pathlib import Path

import pytest

from tandem.router import admin
from tandem.tests.end_to_end.cluster import Part, TestCluster, node_metric, running, until
from tandem.tests.tiny_models import VOCAB

FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LENGTHS = (2, 7, 8, 9, 17, 31, 33, 63, 64, 65, 200, 400)
COMMITTED = 'tandem_transfers_total{outcome="committed"}'


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in lengths]


def side(kind: str, ranks: int, block_size: int, *flags: str) -> tuple[str, ...]:
    return (kind, f"--tensor-parallel-size={ranks}", f"--block-size={block_size}", *flags)


# Ranks and block size. With four ranks the model's two KV heads are held twice.
NODES = {"one": (1, 8), "two": (2, 64), "four": (4, 16)}
PAIRS = list(permutations(NODES, 2))


class Trio:
    """Nodes of which each two are a cluster of their own: a router knows no third, and who prefills
    is settled by their roles."""

    def __init__(self, cluster: TestCluster) -> None:
        self.cluster = cluster
        self._routers = {pair: cluster.start_router() for pair in combinations(NODES, 2)}
        nodes = cluster.start_nodes(*(self._arguments(name) for name in NODES))
        self._nodes = dict(zip(NODES, nodes, strict=True))

    def cast(self, prefill: str, decode: str) -> tuple[Part, Part]:
        """The two, once they play these roles behind the router that knows them."""
        (self.cluster.router,) = (
            router for pair, router in self._routers.items() if {prefill, decode} == {*pair}
        )
        wanted = {prefill: "prefill", decode: "decode"}
        until(lambda: self.cluster.roles().keys() == wanted.keys(), "both nodes at the router")
        for name, role in wanted.items():
            if self.cluster.roles()[name] != role:
                admin.set_role(self.cluster.registry, name, role, force=True)
        self.cluster.wait_roles(wanted)
        return self._nodes[prefill], self._nodes[decode]

    def _arguments(self, name: str) -> tuple[str, ...]:
        joined = [
            f"127.0.0.1:{router.details['registry']}"
            for pair, router in self._routers.items()
            if name in pair
        ]
        return side("decode-node", *NODES[name], f"--node-id={name}", f"--join={','.join(joined)}")


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Trio]:
    with running(tmp_path_factory.mktemp("trio"), tiny_model) as cluster:
        yield Trio(cluster)


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_numbers_of_ranks_and_block_sizes_may_differ(
    trio: Trio, aggregated: TestCluster, there: str, here: str
) -> None:
    # What no node has seen.
    batch = prompts(PAIRS.index((there, here)) + 100, LENGTHS)
    # The second half of each begins like the first, so that both prefix caches have a part in it.
    more = [tokens + end for tokens, end in zip(batch, prompts(1, (40,) * len(batch)), strict=True)]
    want = [c["token_ids"] for c in aggregated.complete(batch + more, **FIELDS)["choices"]]
    prefill, decode = trio.cast(there, here)
    before = node_metric(decode, COMMITTED)
    got = [
        choice["token_ids"]
        for part in (batch, more)
        for choice in trio.cluster.complete(part, **FIELDS)["choices"]
    ]
    assert got == want
    assert node_metric(decode, COMMITTED) - before == 2 * len(batch)
    trio.cluster.wait_idle(prefill, decode)


@pytest.mark.parametrize(
    ("there", "here", "tolerance"),
    [
        ((1, 8, "--dtype=bfloat16"), (2, 32, "--kv-cache-dtype=float16"), 0.1),
        ((1, 64, "--kv-cache-dtype=float32"), (2, 16, "--kv-cache-dtype=fp8"), 0.5),
        ((2, 32, "--kv-cache-dtype=fp8_e4m3"), (1, 8, "--kv-cache-dtype=float32"), 0.5),
        ((1, 16, "--kv-cache-dtype=fp8"), (1, 64, "--kv-cache-dtype=fp8"), 1e-2),
    ],
    ids=str,
)
def test_formats_may_differ(
    tmp_path: Path,
    tiny_model: str,
    there: tuple[int, int, str],
    here: tuple[int, int, str],
    tolerance: float,
) -> None:
    """The KV arrives in the decode node's format. What comes out differs by no more than the
    rounding of the coarser format does, in the log-probability of the first token; where the
    formats are the same, no token does."""
    batch = prompts(5, (17, 65, 200))
    fields = {**FIELDS, "logprobs": 1}
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        decode = cluster.start_node(*side("decode-node", *here), "--no-enable-prefix-caching")
        cluster.wait_nodes(decode=1, prefill=0)
        want = cluster.complete(batch, **fields)["choices"]
        prefill = cluster.start_node(*side("prefill-node", *there))
        cluster.wait_nodes(decode=1, prefill=1)
        got = cluster.complete(batch, **fields)["choices"]
        for one, other in zip(want, got, strict=True):
            first, second = (c["logprobs"]["token_logprobs"][0] for c in (one, other))
            assert first == pytest.approx(second, abs=tolerance)
            assert there[2] != here[2] or one["token_ids"] == other["token_ids"]
        assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
        assert node_metric(decode, COMMITTED) == len(batch)
        cluster.wait_idle(prefill, decode)
