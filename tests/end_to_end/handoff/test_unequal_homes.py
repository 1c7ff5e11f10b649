"""A fast machine that prefills with a model in bfloat16, and a small one elsewhere that decodes a
file of the same model in four bits. It gets what arrives sooner than it would read it itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, DOWN, Wire, running_proxy
from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import BLOCK, Part, TestCluster, node_metric, running
from tandem.tests.end_to_end.support.two_forms import (
    FIELDS,
    Q4_K_M,
    SHAPE,
    assert_greedy,
    reference,
)
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import dequantised, write_gguf

NAME = "--served-model-name=tiny"
# Of KV in float32, as the small machine keeps it: 3 layers, K and V of 8 heads.
TOKEN_BYTES = 3 * 2 * 8 * 32 * 4
# One has a whole block to send. The other's bytes are enough to measure the link by.
SHORT, LONG = BLOCK + 4, 300
# One way. A transfer's four round trips then cost as much as 50 tokens of a machine that reads 250
# a second (``decode_node/estimate.py``), and more beside other tests.
DELAY = 0.05
READS = """
import time
from tandem.shared.engine.rank.runner import ModelRunner
run = ModelRunner._run
def slowly(self, plan, *rest):
    launched = run(self, plan, *rest)
    time.sleep(sum(plan.columns.count) / RATE)
    return launched
ModelRunner._run = slowly
"""


@dataclass(frozen=True)
class Homes:
    """The router, the fast machine, and the wire that its KV goes through; the model's file for the
    small machine, and transformers' models of both."""

    cluster: TestCluster
    prefill: Part
    kv: Wire
    file: Path
    exact: Any
    rounded: Any

    @contextmanager
    def small_machine(self, link: float, reads: float) -> Iterator[Part]:
        """The decode node, to which the link brings the KV of so many tokens a second, and which
        reads so many."""
        self.kv.slow(DOWN, rate=link * TOKEN_BYTES)
        flags = ["--threads=1", "--max-model-len=512", "--max-num-batched-tokens=128", NAME]
        command = ["decode-node", str(self.file), f"--join={self.cluster.registry}", *flags]
        node = self.cluster.launch(
            [*command, "--no-enable-prefix-caching"], prelude=f"RATE = {reads}\n{READS}"
        )
        node.wait_ready()
        self.cluster.wait_nodes(decode=1, prefill=1)
        try:
            yield node
            self.cluster.wait_idle(self.prefill, node)
        finally:
            node.process.send_signal(signal.SIGTERM)
            node.process.wait(15)
        self.cluster.wait_nodes(decode=0, prefill=1)

    def remote_tokens(self, tokens: list[int]) -> int:
        """The tokens of a prompt that are read on the fast machine; the answer is checked."""
        response = self.cluster.complete(tokens, **FIELDS)
        remote_tokens = int(response["tandem"]["remote_tokens"])
        # The fast machine computes in bfloat16.
        loss = 0.1 if remote_tokens else 1e-3
        assert_greedy(self.exact, self.rounded, tokens, remote_tokens, response["choices"][0], loss)
        return remote_tokens


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    root = tmp_path_factory.mktemp("homes")
    folder = root / "model"
    tiny_models.build("qwen3", folder, dtype="bfloat16", **SHAPE, num_key_value_heads=8)
    file = write_gguf(folder, root / "Q4_K_M.gguf", "Q4_K", others=Q4_K_M)
    plain = dequantised(folder, file, root / "plain")
    with running_proxy() as proxy, running(root, str(folder)) as cluster:
        # Beside other tests, heartbeats may be late.
        cluster.start_router(f"--model={folder}", NAME, "--node-timeout=8")
        rpc_wire, (kv, control) = proxy.wire(), proxy.two_wires()
        prefill = cluster.launch_node("prefill-node", NAME, *_behind(rpc_wire, kv))
        prefill.wait_ready()
        host, _, port = prefill.details["address"].rpartition(":")
        rpc_wire.target = host, int(port)
        kv.target, control.target = ("127.0.0.2", kv.port), ("127.0.0.2", control.port)
        rpc_wire.slow(*BOTH, delay=DELAY)
        models = reference(folder), reference(plain)
        yield Homes(cluster, prefill, kv, file, *models)


def _behind(rpc_wire: Wire, kv: Wire) -> list[str]:
    return [
        f"--advertise=127.0.0.1:{rpc_wire.port}",
        # Another address than the wires', so that both can have the same ports.
        "--kv-host=127.0.0.2",
        f"--kv-port={kv.port}",
        f"--kv-advertise=127.0.0.1:{kv.port}",
        "--carrier=tcp",
        "--dtype=bfloat16",
    ]


def local(node: Part, reason: str) -> float:
    return node_metric(node, f'tandem_prompts_total{{where="local",reason="{reason}"}}')


def test_short_prompts_stay_and_long_ones_are_sent(homes: Homes) -> None:
    with homes.small_machine(3000, reads=250) as node:
        assert homes.remote_tokens(prompt(0, SHORT)) == 0
        # Without the prefill node, which has no log probabilities of prompts.
        homes.cluster.complete(prompt(1, 128), **FIELDS, prompt_logprobs=0)
        lengths = [LONG, SHORT, LONG, SHORT]
        counts = [
            homes.remote_tokens(prompt(seed, length)) for seed, length in enumerate(lengths, 2)
        ]
        whole = LONG // BLOCK * BLOCK
        assert counts == [whole, 0, whole, 0]
        assert local(node, "faster here") == 2


def test_a_long_prompt_stays_that_a_slow_link_would_bring_later(homes: Homes) -> None:
    """Although this node has never read one."""
    with homes.small_machine(150, reads=1000) as node:
        assert [homes.remote_tokens(prompt(seed, 60)) for seed in range(6, 9)] == [0, 0, 0]
        # The first shows how slow the link is.
        assert [homes.remote_tokens(prompt(seed, LONG - 100)) > 0 for seed in (9, 10)] == [
            True,
            False,
        ]
        assert local(node, "faster here") == 1
