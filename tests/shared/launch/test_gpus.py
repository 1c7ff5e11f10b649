"""The GPUs of nodes, by the numbers of both, and the conditions for using GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.config import EngineConfig
from tandem.shared.errors import UsageError
from tandem.shared.launch import gpus
from tandem.shared.launch.gpus import engines_of, gpus_by_node, usable_gpus

Given = list[tuple[str | None, int | None]]


def dealt(nodes: int, gpus: int, *, share: bool = False, **options: Any) -> Given:
    """The GPUs of each node, and how many nodes share them. ``gpus`` are usable without --d."""
    config = EngineConfig(**options)
    engines = engines_of(config, nodes, config.device_ids or range(gpus), share=share)
    for engine in engines:
        assert engine.world_size == len(engine.device_ids or "0")
    return [(engine.devices, engine.nodes_per_device) for engine in engines]


@pytest.mark.parametrize(
    ("options", "nodes", "there", "expected"),
    [
        ({}, 1, 1, [("0", 1)]),
        ({}, 2, 2, [("0", 1), ("1", 1)]),
        ({}, 2, 8, [("0", 1), ("1", 1)]),
        ({"tensor_parallel_size": 2}, 2, 4, [("0,1", 1), ("2,3", 1)]),
        ({"tensor_parallel_size": 2}, 1, 3, [("0,1", 1)]),
        ({"nodes_per_device": 7}, 2, 2, [("0", 7), ("1", 7)]),
        ({}, 2, 0, [(None, 2), (None, 2)]),
        ({"tensor_parallel_size": 1}, 1, 0, [(None, 1)]),
        # --d is used up: one node has all, several have equal parts.
        ({"devices": "0,1"}, 1, 8, [("0,1", 1)]),
        ({"devices": "0,1"}, 2, 8, [("0", 1), ("1", 1)]),
        ({"devices": "5,3"}, 2, 0, [("5", 1), ("3", 1)]),
        ({"devices": "0,1,2,3"}, 2, 8, [("0,1", 1), ("2,3", 1)]),
        ({"devices": "4,5,6"}, 3, 8, [("4", 1), ("5", 1), ("6", 1)]),
        ({"devices": "0,1", "tensor_parallel_size": 1}, 2, 8, [("0", 1), ("1", 1)]),
        ({"devices": "0,1,2,3", "tensor_parallel_size": 2}, 2, 8, [("0,1", 1), ("2,3", 1)]),
        ({"devices": "3", "nodes_per_device": 2}, 1, 8, [("3", 2)]),
        # --nodes-per-device allows sharing, too.
        ({"devices": "3", "nodes_per_device": 2}, 2, 8, [("3", 2), ("3", 2)]),
        ({"nodes_per_device": 2}, 3, 2, [("0", 2), ("1", 2), ("0", 2)]),
    ],
)
def test_each_node_gets_its_own_gpus(
    options: dict[str, Any], nodes: int, there: int, expected: Given
) -> None:
    assert dealt(nodes, there, **options) == expected
    assert dealt(nodes, there, share=True, **options) == expected


@pytest.mark.parametrize(
    ("options", "nodes", "there", "expected"),
    [
        ({}, 2, 1, [("0", 2), ("0", 2)]),
        ({}, 3, 2, [("0", 2), ("1", 1), ("0", 2)]),
        ({"tensor_parallel_size": 2}, 3, 5, [("0,1", 2), ("2,3", 1), ("0,1", 2)]),
        ({"tensor_parallel_size": 2}, 2, 3, [("0,1", 2), ("0,1", 2)]),
        ({"devices": "5"}, 2, 8, [("5", 2), ("5", 2)]),
        ({"devices": "4,5"}, 3, 8, [("4", 2), ("5", 1), ("4", 2)]),
        ({"devices": "4,5", "tensor_parallel_size": 2}, 2, 8, [("4,5", 2), ("4,5", 2)]),
    ],
)
def test_gpus_are_shared_only_where_that_is_allowed(
    options: dict[str, Any], nodes: int, there: int, expected: Given
) -> None:
    assert dealt(nodes, there, share=True, **options) == expected
    with pytest.raises(UsageError, match="let nodes share GPUs with --share-devices"):
        dealt(nodes, there, **options)


@pytest.mark.parametrize(
    ("options", "nodes", "there", "problem"),
    [
        ({}, 2, 1, "2 nodes need 2 GPUs, and 1 is usable here"),
        ({"devices": "0"}, 2, 8, "2 nodes need 2 GPUs, and --d names 1"),
        ({"nodes_per_device": 2}, 3, 1, "3 nodes need 3 GPUs, and 1 is usable here"),
        (
            {"tensor_parallel_size": 4},
            1,
            2,
            "1 node with --tensor-parallel-size 4 needs 4 GPUs, and 2 are usable here; lower",
        ),
        (
            {"devices": "0,1,2", "tensor_parallel_size": 2},
            2,
            8,
            "2 nodes with --tensor-parallel-size 2 need 4 GPUs, and --d names 3",
        ),
        (
            {"devices": "0,1,2"},
            2,
            8,
            "--d 0,1,2 names 3 GPUs, and 2 nodes cannot have equal parts of them; name 2 or 4",
        ),
        (
            {"devices": "0,1,2,3", "tensor_parallel_size": 2},
            1,
            8,
            "--d 0,1,2,3 names 4 GPUs, of which 1 node with --tensor-parallel-size 2 uses 2",
        ),
        (
            {"devices": "0,1,2,3", "tensor_parallel_size": 1},
            2,
            8,
            "--d 0,1,2,3 names 4 GPUs, of which 2 nodes with --tensor-parallel-size 1 use 2",
        ),
    ],
)
def test_gpus_that_do_not_go_round_or_would_idle_are_refused(
    options: dict[str, Any], nodes: int, there: int, problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        dealt(nodes, there, **options)
    assert problem in str(caught.value)


def test_each_node_that_was_given_gpus_has_a_line() -> None:
    names = ["prefill-node-0", "prefill-node-1", "decode-node-2"]
    *lines, warning = gpus_by_node(names, engines_of(EngineConfig(), 3, (0, 1), share=True))
    assert lines == [
        "prefill-node-0: GPU 0, shared by 2 nodes",
        "prefill-node-1: GPU 1",
        "decode-node-2: GPU 0, shared by 2 nodes",
    ]
    assert "prefill delays decode" in warning
    alone = engines_of(EngineConfig(nodes_per_device=2), 3, (0, 1, 2))
    assert list(gpus_by_node(names, alone)) == [f"{name}: GPU {i}" for i, name in enumerate(names)]
    assert list(gpus_by_node(names, engines_of(EngineConfig(), 3, ()))) == []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Two GPUs, a driver for CUDA 13.0, and a torch with a given version file."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
    monkeypatch.setattr(gpus, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "cuda_of_driver", lambda: (13, 0))
    spec = gpus.importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: spec)

    def write_version(text: str) -> None:
        (folder / "version.py").write_text(text)

    return write_version


def test_gpus_count_if_torch_can_use_them_and_none_are_chosen(
    machine: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine("from typing import Optional\ncuda: Optional[str] = '13.2'\n")
    for device, usable in (("auto", (0, 1)), ("cuda", (0, 1)), ("cpu", ())):
        assert usable_gpus(EngineConfig(device=device)) == usable
    assert usable_gpus(EngineConfig(devices="1")) == (1,)
    assert caplog.text == ""
    with pytest.raises(UsageError, match="--d 1,7: this machine's usable GPUs are 0 to 1"):
        usable_gpus(EngineConfig(devices="1,7"))


def test_gpus_that_torch_cannot_use_are_named(
    machine: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine("cuda = None\n")
    assert usable_gpus(EngineConfig()) == ()
    assert "installed without CUDA, so the 2 GPUs here are not used" in caplog.text
    machine("cuda = '14.1'\n")
    assert usable_gpus(EngineConfig()) == ()
    expected = "driver is made for CUDA 13.0, torch for 14.1, so the 2 GPUs here are not used; upd"
    assert expected in caplog.text
    assert usable_gpus(EngineConfig(devices="1")) == (1,)  # whose node says what is wrong


def test_a_node_on_several_hosts_uses_its_part_of_the_gpus_of_this_one() -> None:
    config = EngineConfig(tensor_parallel_size=4, nnodes=2, master_addr="10.0.0.7")
    for devices in (None, "0,1"):
        (engine,) = engines_of(replace(config, devices=devices), 1, (0, 1))
        assert (engine.devices, engine.world_size, engine.ranks_per_host) == ("0,1", 4, 2)
