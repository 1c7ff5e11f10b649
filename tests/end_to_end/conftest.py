"""The clusters that several black-box tests share. They end with the last of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.cluster import TestCluster, running
from tandem.tests.support.checkpoints.tiny_models import cached
from tandem.tests.support.forked import session_forker


@pytest.fixture(scope="package", autouse=True)
def forker() -> Iterator[None]:
    """Parts that are forked, which costs a tenth of an interpreter's start."""
    TestCluster.forker = session_forker()
    yield
    TestCluster.forker = None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(cached("qwen3", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="package")
def aggregated(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[TestCluster]:
    """A router and a decode node that prefills for itself, and caches no prefix."""
    with running(tmp_path_factory.mktemp("aggregated"), tiny_model) as cluster:
        cluster.start_router()
        cluster.start_node("decode-node", "--no-enable-prefix-caching")
        cluster.wait_nodes(decode=1, prefill=0)
        yield cluster


@pytest.fixture(scope="package", params=["tcp", "shared_memory"])
def disaggregated(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, request: pytest.FixtureRequest
) -> Iterator[TestCluster]:
    """The same and a prefill node; every prompt of more than one token goes through it, over each
    carrier in turn. The router keeps files."""
    with running(tmp_path_factory.mktemp("disaggregated"), tiny_model) as cluster:
        files = tmp_path_factory.mktemp("files")
        cluster.start_router("--batch-dir", str(files))
        carrier = f"--carrier={request.param}"
        cluster.start_nodes(("prefill-node", carrier), ("decode-node", carrier))
        cluster.wait_nodes(decode=1, prefill=1)
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
