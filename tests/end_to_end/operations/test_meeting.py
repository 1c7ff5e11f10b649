"""A prefill node and a decode node that share a folder and no port: ``--pd-url file:///folder``."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    CONTEXT,
    Part,
    TestCluster,
    committed_transfers,
    node_metric,
    running,
    until,
)

LENGTH = 20 * BLOCK


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m")  # its path is short


def _server(model: str, folder: Path, carrier: str) -> list[str]:
    server = ["serve", model, "--pd-server", f"--pd-url=file://{folder}", "--dtype=float32"]
    return [*server, "--threads=1", f"--max-model-len={CONTEXT}", f"--carrier={carrier}"]


def test_nodes_meet_in_a_folder_with_and_without_shared_memory(
    tmp_path: Path, folder: Path, tiny_model: str
) -> None:
    server = _server(tiny_model, folder, "auto")
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router(f"--pd-url=file://{folder}/")
        prefill = cluster.start(server)
        second = cluster.launch(server)
        assert second.process.wait(60) == 1
        assert "another prefill node listens in" in second.log.read_text()
        decode = cluster.start_node("decode-node", "--carrier=auto")
        cluster.wait_nodes(decode=1, prefill=1)
        seeds = itertools.count(1)  # the first greeting may take longer than a request waits
        until(lambda: _prefilled_there(cluster, decode, next(seeds)), "the node to be used")
        until(lambda: _peers(decode, "shared_memory") == 1, "KV to move in shared memory")
        # A process that was killed leaves its sockets; the next one takes their places, and sends
        # through them what it cannot share.
        prefill.kill()
        prefill = cluster.start(_server(tiny_model, folder, "tcp"))
        until(lambda: _prefilled_there(cluster, decode, next(seeds)), "the new node to be used")
        until(lambda: _peers(decode, "tcp") == 1, "KV to move through sockets")
        prefill.process.terminate()
        assert prefill.process.wait(30) == 0
        assert [entry.name for entry in folder.iterdir()] == ["prefill.lock"]


def _peers(node: Part, carrier: str) -> float:
    return node_metric(node, f'tandem_data_plane_peers{{carrier="{carrier}",rank="0"}}')


def _prefilled_there(cluster: TestCluster, decode: Part, seed: int) -> bool:
    before = committed_transfers(decode)
    body = cluster.complete(prompt(seed, LENGTH), max_tokens=4, temperature=0)
    assert body["usage"]["completion_tokens"] == 4
    return committed_transfers(decode) == before + 1
