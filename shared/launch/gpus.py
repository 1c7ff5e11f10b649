"""Which GPUs the nodes that one command starts get, and how many nodes share each.

Nobody here loads torch, and no node is kept from seeing the others' GPUs: CUDA opens memory only of
GPUs that a process may see, so ``CUDA_VISIBLE_DEVICES`` for each would rule out CUDA IPC.
"""

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
    """GPUs to choose from; 0 where the options or torch leave no choice."""
    if config.device == CPU or config.devices is not None:
        return 0
    count = device_count()
    if count and not _torch_has_cuda():
        log.warning(
            "torch is installed without CUDA, so the %d GPUs here are not used; install a build "
            "that has it (make serve TORCH_INDEX=), or say --device cpu",
            count,
        )
        return 0
    return count


def _torch_has_cuda() -> bool:
    """Its version says so in a file of its own; to import torch takes longer than all else that a
    launcher does."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and runpy.run_path(str(version)).get("cuda") is not None


def engines_of(config: EngineConfig, nodes: int, gpus: int) -> list[EngineConfig]:
    """What each node is told: its GPUs, in turn, and how many nodes plan for parts of them.

    Options that are given stay as they are. Raises ``UsageError`` when a node would need more GPUs
    than there are.
    """
    size = config.world_size
    if gpus == 0:
        return [_shared(config, nodes)] * nodes
    if size > gpus:
        raise UsageError(
            f"--tensor-parallel-size {size} needs {size} GPUs for a node, and {gpus} can be used "
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
    """A line for each node that was given GPUs."""
    for name, engine in zip(names, engines, strict=True):
        if engine.devices is not None:
            shared = engine.nodes_per_device or 1
            beside = f", which {shared} nodes share" if shared > 1 else ""
            yield f"{name}: GPU {engine.devices}{beside}"
