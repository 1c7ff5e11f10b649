"""The cost of placing one prompt, by policy and number of nodes.

    python -m tandem.benchmarks.router.placement [--nodes 10 100 1000] [--dry]

Half of the nodes are decode nodes. Most prompts are new; every fourth continues one that some nodes
have cached. The whole placement is timed, including the prompt's keys, as for a request. It
alternates with the simplest possible placement, the next decode node of a list.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node_table import NodeTable
from tandem.router.placement.node_prefixes import PromptKeys
from tandem.router.placement.policies import POLICIES
from tandem.shared.kv.prefix_keys import chain, pack_keys, short_key

BLOCK = 16
PROMPT_TOKENS = 512
KEYS = 16_384  # of one node, besides shared prefixes
SHARED_PROMPTS = 8
GOAL_SECONDS = 0.3e-3

Prompt = list[int]


class SimulatedFleet:
    """A node table without connections."""

    def __init__(self, nodes: int) -> None:
        self._random = random.Random(nodes)
        self.shared = [self.new_prompt() for _ in range(SHARED_PROMPTS)]
        self.table = NodeTable(60.0)
        for number in range(nodes):
            self.table.join(self._join(number), f"10.0.{number >> 8}.{number & 255}:8100")
        self.decode = [node for node in self.table if not node.is_prefill]

    def new_prompt(self) -> Prompt:
        return [self._random.randrange(100_000) for _ in range(PROMPT_TOKENS)]

    def prompts(self, count: int) -> list[Prompt]:
        return [
            self.new_prompt() if number % 4 else self.shared[number // 4 % SHARED_PROMPTS]
            for number in range(count)
        ]

    def _join(self, number: int) -> pb.JoinRequest:
        busy = self._random.randrange(64)
        keys = {self._random.getrandbits(64) for _ in range(KEYS)}
        if number % 5 == 0:
            shared = self._random.choice(self.shared)
            keys |= {short_key(key) for key in chain(shared, BLOCK)}
        return pb.JoinRequest(
            node_id=f"node-{number}",
            epoch=1,
            role=pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE,
            model=pb.ModelCard(fingerprint="layers=2"),
            load=pb.Load(
                running=busy,
                free_blocks=20_000 - 100 * busy,
                total_blocks=20_000,
                queued_prefill_tokens=100 * busy,
                prefill_tokens_per_second=9000.0 + busy,
                block_size=BLOCK,
            ),
            prefixes=pb.Prefixes(
                version=1, block_size=BLOCK, stride=1, added=pack_keys(sorted(keys))
            ),
        )


def timed(work: Callable[[Prompt], object], prompts: Sequence[Prompt]) -> list[float]:
    """Duration of each call in seconds."""
    samples = []
    for prompt in prompts:
        start = time.perf_counter()
        work(prompt)
        samples.append(time.perf_counter() - start)
    return samples


def placing(fleet: SimulatedFleet, name: str) -> Callable[[Prompt], object]:
    """A placement as ``Dispatcher`` makes it."""
    return lambda prompt: fleet.table.place(PromptKeys(prompt), POLICIES[name])


def next_of(fleet: SimulatedFleet) -> Callable[[Prompt], object]:
    """The simplest placement: the next node of a list."""
    nodes, turns = fleet.decode, itertools.count()
    return lambda prompt: nodes[next(turns) % len(nodes)]


def measure(nodes: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the report for ``number`` nodes."""
    fleet, rows = SimulatedFleet(nodes), []
    for name in POLICIES:
        work, simplest = placing(fleet, name), next_of(fleet)
        timed(work, fleet.prompts(20))
        prompts = fleet.prompts(rounds)
        samples, baseline = timed(work, prompts), timed(simplest, prompts)
        for part, figure in (("p50", statistics.median(samples)), ("p99", _p99(samples))):
            rows.append(
                {
                    "metric": f"placement, {name}, {nodes} nodes, {part}",
                    "value": figure * 1e3,
                    "unit": "ms",
                    "goal": f"<={GOAL_SECONDS * 1e3:g}" if part == "p50" else "",
                    "against": f"the next of a list ({statistics.median(baseline) * 1e6:.2f} us)",
                }
            )
    return rows


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1000)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    rows = [row for nodes in options.nodes for row in measure(nodes, options.rounds)]
    publish("router/placement", rows, dry=options.dry)


if __name__ == "__main__":
    main()
