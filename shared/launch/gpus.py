"""Assigns GPUs to the nodes that one command starts.

torch is not loaded here. Nodes get ``--d`` instead of ``CUDA_VISIBLE_DEVICES``: CUDA opens memory
of visible GPUs only, so hiding the others' GPUs would rule out CUDA IPC."""

from __future__ import annotations

import importlib.util
import logging
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..config import EngineConfig
from ..errors import UsageError
from ..handoff.carriers.cuda_ipc.cuda_driver import device_count
from ..kv.planning import CPU

log = logging.getLogger("tandem.node")


def usable_gpus(config: EngineConfig) -> int:
    """Number of GPUs to assign; 0 if the options or a CPU build of torch leave no choice."""
    if config.device == CPU or config.devices is not None:
        return 0
    count = device_count()
    if count and not _torch_has_cuda():
        log.warning(
            "torch is installed without CUDA, so the %d GPUs here are not used; install a build "
            "with CUDA (make serve TORCH_INDEX=), or add --device cpu",
            count,
        )
        return 0
    return count


def _torch_has_cuda() -> bool:
    """True if torch's version file names a CUDA version. Importing torch would take longer than
    everything else that a launcher does."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and runpy.run_path(str(version)).get("cuda") is not None


def engines_of(config: EngineConfig, nodes: int, gpus: int) -> list[EngineConfig]:
    """The configuration of each node: its GPUs, assigned in turn, and how many nodes share them.

    Explicit options are kept. Raises ``UsageError`` if a node needs more GPUs than there are.
    """
    size = config.world_size
    if gpus == 0:
        return [_shared(config, nodes)] * nodes
    if size > gpus:
        raise UsageError(
            f"--tensor-parallel-size {size} needs {size} GPUs per node, and {gpus} are usable "
            f"here; lower it, or add --device cpu"
        )
    groups = gpus // size
    engines = []
    for number in range(nodes):
        group = number % groups
        devices = ",".join(str(group * size + rank) for rank in range(size))
        sharing = len(range(group, nodes, groups))
        engines.append(_shared(replace(config, devices=devices), sharing))
    return engines


def _shared(config: EngineConfig, nodes: int) -> EngineConfig:
    return replace(config, nodes_per_device=config.nodes_per_device or nodes)


def gpus_by_node(names: Sequence[str], engines: Sequence[EngineConfig]) -> Iterator[str]:
    """One line for each node with GPUs."""
    for name, engine in zip(names, engines, strict=True):
        if engine.devices is not None:
            shared = engine.nodes_per_device or 1
            beside = f", shared by {shared} nodes" if shared > 1 else ""
            yield f"{name}: GPU {engine.devices}{beside}"
