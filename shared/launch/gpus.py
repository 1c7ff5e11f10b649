"""Assignment of GPUs to the nodes that one command starts, without loading torch.

Nodes get ``--d`` instead of ``CUDA_VISIBLE_DEVICES``: CUDA can only open memory of visible GPUs, so
hiding the others' GPUs would rule out CUDA IPC."""

from __future__ import annotations

import importlib.util
import logging
import runpy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..config import EngineConfig
from ..errors import UsageError
from ..handoff.carriers.cuda_ipc.cuda_driver import cuda_of_driver, device_count
from ..kv.planning import CPU
from . import mps

log = logging.getLogger("tandem.node")


def usable_gpus(config: EngineConfig) -> tuple[int, ...]:
    """The GPUs of ``--d``, or else all of this machine; none if the options exclude them, or torch
    cannot use them. Raises ``UsageError``."""
    if config.device == CPU:
        return config.device_ids
    count = device_count()
    if config.devices is not None:
        if count and max(config.device_ids) >= count:
            last = f"0 to {count - 1}" if count > 1 else "0"
            raise UsageError(f"--d {config.devices}: this machine's usable GPUs are {last}")
        return config.device_ids
    if count and (problem := _problem()):
        cause, remedy = problem
        log.warning(
            "%s, so the %d GPUs here are not used; %s, or add --device cpu", cause, count, remedy
        )
        return ()
    return tuple(range(count))


def _problem() -> tuple[str, str] | None:
    """The reason why torch can use no GPU here, and the remedy."""
    built = _cuda_of_torch()
    if not built:
        remedy = "install a build with CUDA (make serve TORCH_INDEX=)"
        return "torch is installed without CUDA", remedy
    driver = cuda_of_driver()
    # Drivers support all minor versions of the CUDA that they were made for.
    if driver[0] < int(built.partition(".")[0]):
        remedy = f"update the driver, or install a torch for CUDA {driver[0]}"
        return f"the driver is made for CUDA {driver[0]}.{driver[1]}, torch for {built}", remedy
    return None


def _cuda_of_torch() -> str:
    """The version of CUDA in torch's version file; empty without one. Importing torch would take
    longer than the rest of a launcher's start."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version = Path(spec.origin).with_name("version.py")
    return (version.is_file() and runpy.run_path(str(version)).get("cuda")) or ""


def engines_of(
    config: EngineConfig, nodes: int, gpus: Sequence[int], *, share: bool = False
) -> list[EngineConfig]:
    """The configuration of each node: its GPUs, dealt out in turn, and how many nodes share them.

    A node gets ``--tensor-parallel-size`` GPUs; by default one, or an equal part of ``--d``. Nodes
    only share GPUs with ``share`` or ``--nodes-per-device``.

    Raises ``UsageError`` if there are too few GPUs, or if some of ``--d`` would not be used.
    """
    if not gpus:
        return [_shared(config, nodes)] * nodes
    size = _gpus_of_a_node(config, nodes, len(gpus))
    groups = len(gpus) // size
    max_sharing = config.nodes_per_device or (nodes if share else 1)
    if nodes > groups * max_sharing:
        raise UsageError(_too_few(config, nodes, size, len(gpus)))
    if config.devices is not None and len(gpus) != min(nodes, groups) * size:
        raise UsageError(
            f"--d {config.devices} names {len(gpus)} GPUs, of which {_counted(nodes)} with "
            f"--tensor-parallel-size {size} {'uses' if nodes == 1 else 'use'} "
            f"{min(nodes, groups) * size}; name as many, or change the number of nodes"
        )
    engines = []
    for number in range(nodes):
        group = number % groups
        own = ",".join(str(gpu) for gpu in gpus[group * size : (group + 1) * size])
        sharing = len(range(group, nodes, groups))
        engine = replace(config, devices=own, tensor_parallel_size=size * config.nnodes)
        engines.append(_shared(engine, sharing))
    return engines


def _gpus_of_a_node(config: EngineConfig, nodes: int, gpus: int) -> int:
    """Number of this host's GPUs for each node. Raises ``UsageError`` if ``--d`` cannot be divided
    evenly."""
    size = config.tensor_parallel_size
    if size is not None or config.devices is None:
        return (size or config.nnodes) // config.nnodes
    if gpus > nodes and gpus % nodes:
        fewer = gpus // nodes * nodes
        raise UsageError(
            f"--d {config.devices} names {gpus} GPUs, and {nodes} nodes cannot have equal parts of "
            f"them; name {fewer} or {fewer + nodes}"
        )
    return max(1, gpus // nodes)


def _too_few(config: EngineConfig, nodes: int, size: int, gpus: int) -> str:
    are = "is" if gpus == 1 else "are"
    there = f"{gpus} {are} usable here" if config.devices is None else f"--d names {gpus}"
    ranks = f" with --tensor-parallel-size {size}" if size > 1 else ""
    need = f"{_counted(nodes)}{ranks} {'needs' if nodes == 1 else 'need'} {nodes * size} GPUs"
    if size > gpus:
        return f"{need}, and {there}; lower --tensor-parallel-size, or add --device cpu"
    return (
        f"{need}, and {there}; start fewer nodes, add --device cpu, or let nodes share GPUs with "
        "--share-devices"
    )


def _counted(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _shared(config: EngineConfig, nodes: int) -> EngineConfig:
    return replace(config, nodes_per_device=config.nodes_per_device or nodes)


def gpus_by_node(names: Sequence[str], engines: Sequence[EngineConfig]) -> Iterator[str]:
    """A line for each node with GPUs, and a warning if some are shared without MPS."""
    users = Counter(gpu for engine in engines for gpu in engine.device_ids)
    for name, engine in zip(names, engines, strict=True):
        if engine.devices is not None:
            sharing = max(users[gpu] for gpu in engine.device_ids)
            beside = f", shared by {sharing} nodes" if sharing > 1 else ""
            yield f"{name}: GPU {engine.devices}{beside}"
    if max(users.values(), default=1) > 1 and not mps.is_running():
        yield (
            "tandem: nodes share GPUs, on which they take turns unless NVIDIA's MPS runs: prefill "
            "delays decode"
        )
