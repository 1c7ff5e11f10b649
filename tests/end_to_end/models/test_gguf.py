"""GGUF files served, and handed over to and from the folder of the same model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import TestCluster, committed_transfers, running
from tandem.tests.support import fake_hub
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.extent import selected
from tandem.tests.support.forked import session_forker

FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
BATCH = [prompt(length, length) for length in (65, 200)]


@pytest.fixture(scope="module")
def file(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return str(write_gguf(Path(tiny_model), target))


@pytest.fixture(scope="module", params=selected(["folder to file"], full=["file to folder"]))
def mixed(
    request: pytest.FixtureRequest,
    file: str,
    tiny_model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TestCluster]:
    """A prefill node with one of both, a decode node with the other; the router pins the first."""
    models = [tiny_model, file] if request.param.startswith("folder") else [file, tiny_model]
    with running(tmp_path_factory.mktemp("mixed"), models[0]) as cluster:
        cluster.start_router(f"--model={models[0]}", "--served-model-name=tiny")
        nodes = []
        for kind, cluster.model in zip(("prefill-node", "decode-node"), models, strict=True):
            nodes.append(cluster.start_node(kind, "--served-model-name=tiny"))
        cluster.wait_nodes(decode=1, prefill=1)
        yield cluster
        assert committed_transfers(nodes[1]) >= len(BATCH)


def test_a_folder_and_a_file_hand_over(mixed: TestCluster, aggregated: TestCluster) -> None:
    choices: list[list[Any]] = [
        cluster.complete(BATCH, **FIELDS)["choices"] for cluster in (mixed, aggregated)
    ]
    outputs, expected = ([choice["token_ids"] for choice in each] for each in choices)
    assert outputs == expected


def test_serve_takes_a_file_of_the_hub_by_f(
    file: str, tmp_path: Path, aggregated: TestCluster
) -> None:
    with fake_hub.serving() as hub:
        hub.put("owner/model", {"model-F32.gguf": Path(file).read_bytes(), "model-F16.gguf": b""})
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        options = ["--m", "owner/model", "--f", "model-F32.gguf"]
        name, tokens = serve_once(options, tmp_path, environment | {"NO_PROXY": "127.0.0.1"})
        assert hub.given == ["model-F32.gguf"]
    assert name == "owner/model"
    expected = aggregated.complete(BATCH, **FIELDS)["choices"]
    assert tokens == [choice["token_ids"] for choice in expected]


def serve_once(
    model: list[str], folder: Path, environment: dict[str, str]
) -> tuple[str, list[list[int]]]:
    """The name of the served model, and its outputs for ``BATCH``."""
    command = ["serve", *model, "--port=0"]
    options = [
        "--prefill-nodes=1",
        "--share-devices",
        f"--log-dir={folder / 'logs'}",
        "--drain-timeout=1",
        "--threads=1",
    ]
    read, write = os.pipe()
    process = session_forker().start(
        [*command, *options], os.environ | environment, write, 2, ready=write
    )
    os.close(write)
    try:
        with open(read) as output:
            match = re.search(r"http://\S+", output.readline())
            assert match
            models = httpx.get(f"{match[0]}/v1/models", timeout=60).json()["data"]
            body = {"model": models[0]["id"], "prompt": BATCH, **FIELDS}
            response = httpx.post(f"{match[0]}/v1/completions", json=body, timeout=60).json()
            process.terminate()
            process.wait(60)
    finally:
        process.kill()
    return models[0]["id"], [each["token_ids"] for each in response["choices"]]
