"""A prompt that ends every process that computes it takes two, and no more; others are served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import Part, TestCluster, running, until

DEADLY = [7] * 40
# Ranks end at the prompt as they would when a kernel crashes.
PRELUDE = """
import os
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.step_rows import rows_of
launch = ModelRunner.launch
def deadly(self, plan, *rest):
    if any(list(row.tokens[:3]) == [7, 7, 7] for row in rows_of(plan)):
        os._exit(139)
    return launch(self, plan, *rest)
ModelRunner.launch = deadly
"""


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: str) -> Iterator[TestCluster]:
    with running(tmp_path, tiny_model) as cluster:
        cluster.prelude = PRELUDE
        cluster.start_router()
        yield cluster


def has_died(part: Part) -> bool:
    return part.process.poll() is not None


@pytest.mark.parametrize(
    "kinds",
    [("decode-node",) * 3, ("prefill-node", "decode-node", "decode-node")],
    ids=["decode", "prefill-and-decode"],
)
def test_a_prompt_that_kills_processes_is_refused_after_two(
    cluster: TestCluster, kinds: tuple[str, ...]
) -> None:
    nodes = cluster.start_nodes(*((kind,) for kind in kinds))
    prefill = kinds.count("prefill-node")
    cluster.wait_nodes(decode=3 - prefill, prefill=prefill)
    good = prompt(1, 40)
    want = cluster.complete(good, max_tokens=8, temperature=0)

    status, body = cluster.post("/v1/completions", {"prompt": DEADLY, "max_tokens": 8})
    assert status in (500, 503) and body["error"]["type"] == "server_error", body

    until(lambda: sum(map(has_died, nodes)) == 2, "two nodes to end")
    (survivor,) = [node for node in nodes if not has_died(node)]
    assert sum(has_died(node) for node in nodes if "prefill" in node.log.name) == prefill
    cluster.wait_parts(survivor)
    assert cluster.complete(good, max_tokens=8, temperature=0)["choices"] == want["choices"]
    cluster.wait_idle(survivor)
    assert not has_died(survivor), survivor.log.read_text()
