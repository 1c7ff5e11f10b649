"""The GPUs of nodes, by the number of both, and when GPUs count at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.shared.config import EngineConfig
from tandem.shared.errors import UsageError
from tandem.shared.launch import gpus
from tandem.shared.launch.gpus import engines_of, gpus_by_node, usable_gpus


@pytest.mark.parametrize(
    ("ranks", "nodes", "there", "given"),
    [
        (1, 2, 1, [("0", 2), ("0", 2)]),
        (1, 2, 2, [("0", 1), ("1", 1)]),
        (1, 2, 8, [("0", 1), ("1", 1)]),
        (1, 3, 2, [("0", 2), ("1", 1), ("0", 2)]),
        (2, 2, 4, [("0,1", 1), ("2,3", 1)]),
        (2, 3, 5, [("0,1", 2), ("2,3", 1), ("0,1", 2)]),
        (2, 2, 3, [("0,1", 2), ("0,1", 2)]),
        (1, 2, 0, [(None, 2), (None, 2)]),
    ],
)
def test_nodes_get_gpus_in_turn_and_know_how_many_share_them(
    ranks: int, nodes: int, there: int, given: list[tuple[str | None, int]]
) -> None:
    engines = engines_of(EngineConfig(tensor_parallel_size=ranks), nodes, there)
    assert [(engine.devices, engine.nodes_per_device) for engine in engines] == given
    assert {engine.world_size for engine in engines} == {ranks}


def test_what_was_given_stays() -> None:
    named = EngineConfig(devices="3,5", nodes_per_device=7)
    assert engines_of(named, 2, 0) == [named, named]
    own = [engine.nodes_per_device for engine in engines_of(EngineConfig(nodes_per_device=7), 2, 2)]
    assert own == [7, 7]


def test_a_node_that_needs_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="needs 4 GPUs per node, and 2 are usable"):
        engines_of(EngineConfig(tensor_parallel_size=4), 1, 2)


def test_each_node_that_was_given_gpus_has_a_line() -> None:
    names = ["prefill-node-0", "prefill-node-1", "decode-node-2"]
    assert list(gpus_by_node(names, engines_of(EngineConfig(), 3, 2))) == [
        "prefill-node-0: GPU 0, shared by 2 nodes",
        "prefill-node-1: GPU 1",
        "decode-node-2: GPU 0, shared by 2 nodes",
    ]
    assert list(gpus_by_node(names, engines_of(EngineConfig(), 3, 0))) == []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Two GPUs, and a torch with a given version file."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
    monkeypatch.setattr(gpus, "device_count", lambda: 2)
    found = gpus.importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: found)

    def write_version(text: str) -> None:
        (folder / "version.py").write_text(text)

    return write_version


def test_gpus_count_if_torch_can_use_them_and_none_are_chosen(
    machine: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    for device, count in (("auto", 2), ("cuda", 2), ("cpu", 0)):
        assert usable_gpus(EngineConfig(device=device)) == count
    assert usable_gpus(EngineConfig(devices="1")) == 0
    assert caplog.text == ""


def test_gpus_that_torch_cannot_use_are_named(
    machine: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine("cuda = None\n")
    assert usable_gpus(EngineConfig()) == 0
    assert "installed without CUDA, so the 2 GPUs here are not used" in caplog.text
