"""Nodes of another model at a router's door: refused by field and values, while serving goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.clients import greedy
from tandem.tests.end_to_end.support.cluster import START_SECONDS, TestCluster, is_ready, until


@pytest.fixture
def strangers(tmp_path: Path, tiny_model: str, disaggregated: TestCluster) -> Iterator[TestCluster]:
    """Nodes that join the same router with a model of other positions."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5000.0
    (folder / "config.json").write_text(json.dumps(config))
    cluster = TestCluster(tmp_path, str(folder), router=disaggregated.router)
    yield cluster
    cluster.stop()


# They never get as far as to move KV.
@pytest.mark.parametrize("disaggregated", ["shared_memory"], indirect=True)
def test_nodes_of_another_model_are_refused_without_interrupting_service(
    strangers: TestCluster, disaggregated: TestCluster
) -> None:
    want = greedy(disaggregated, 3)
    reason = "rope_theta is '10000.0' in the cluster and '5000.0' on the node"
    for stranger in [strangers.launch_node(kind) for kind in ("prefill-node", "decode-node")]:
        until(lambda s=stranger: reason in s.log.read_text(), "the refusal", START_SECONDS)  # type: ignore[misc]
        assert stranger.process.poll() is None and not is_ready(stranger)
        assert greedy(disaggregated, 3) == want
    assert disaggregated.router is not None
    log = disaggregated.router.log.read_text()
    assert "is refused: different models: rope_theta" in log
    disaggregated.wait_nodes(decode=1, prefill=1)
