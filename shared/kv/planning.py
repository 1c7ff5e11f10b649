"""Planning of the KV cache: the devices that ranks report, and how many blocks fit there.

A head never loads torch, so it cannot know whether ``--device auto`` is a GPU: it plans from its
ranks' reports. Explicit options override the defaults here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import EngineConfig
from ..errors import StartupError
from ..models.spec import DecoderSpec
from .layout import kv_layout, token_bytes

CPU = "cpu"
CUDA = "cuda"

# GPU memory that CUDA and its libraries take for each process, and NCCL with several ranks: torch
# counts neither.
CONTEXT_BYTES = 512 << 20
_NCCL_BYTES = 1 << 30
# The share of a GPU that its nodes use together. The rest is for what no profile sees.
GPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class RankDevice:
    """A rank's device before anything is loaded. ``kind`` is torch's device type; ``capability`` is
    the generation of an NVIDIA GPU, (0, 0) of any other device."""

    kind: str
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)

    @property
    def has_bfloat16(self) -> bool:
        """False for NVIDIA's GPUs before sm_80."""
        return self.capability == (0, 0) or self.capability >= (8, 0)

    def __str__(self) -> str:
        free, total = self.free_bytes / (1 << 30), self.total_bytes / (1 << 30)
        return f"{self.name}: {free:.1f} of {total:.1f} GiB are free"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory once its weights are loaded. ``free_bytes`` is free on the device.

    On a GPU, ``used_bytes`` is for weights, libraries and the data plane, ``step_bytes`` for the
    largest step, and ``graph_bytes`` for CUDA graphs.
    """

    free_bytes: int
    used_bytes: int
    bytes_per_block: int
    step_bytes: int = 0
    graph_bytes: int = 0

    @property
    def steps_bytes(self) -> int:
        """What steps take, eager or replayed."""
        return self.step_bytes + self.graph_bytes

    def __str__(self) -> str:
        return (
            f"{_gib(self.used_bytes)} for weights and CUDA, {_gib(self.step_bytes)} for a step and "
            f"{_gib(self.graph_bytes)} for CUDA graphs; {_gib(self.free_bytes)} are free"
        )


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """The devices of a node's ranks, all of one kind. ``nodes`` nodes share each device; as many
    ranks are on each of the ``hosts``."""

    ranks: tuple[RankDevice, ...]
    nodes: int = 1
    hosts: int = 1

    @property
    def on_cpu(self) -> bool:
        return self.ranks[0].kind == CPU

    @property
    def token_budget(self) -> int:
        """Tokens of one step. A GPU needs many to be busy; on a CPU they would delay streams."""
        return 512 if self.on_cpu else 8192

    @property
    def max_num_seqs(self) -> int:
        """Sequences of one step. A GPU decodes many in hardly more time than a few."""
        return 64 if self.on_cpu else 256

    @property
    def cache_fraction(self) -> float:
        """The fraction of the memory that is left for caches which goes to them."""
        # A CPU's memory is the whole machine's, which has other uses too.
        return min(0.3 * self.nodes, 0.6) if self.on_cpu else 1.0

    def gpu_share(self, config: EngineConfig) -> float:
        """The share of each GPU's memory that this node may use for everything."""
        if config.gpu_memory_utilization is not None:
            return config.gpu_memory_utilization
        sized = config.kv_fraction is not None or config.num_blocks is not None
        return (1.0 if sized else GPU_SHARE) / self.nodes

    def cache_bytes(self, memory: Sequence[RankMemory], share: float = GPU_SHARE) -> int:
        """The maximum size of a cache, on the rank with the least memory.

        ``share`` is the node's share of each GPU, for the cache and all else. It does not depend on
        other nodes that are starting at the same time, as free memory does.
        """
        free = min(each.free_bytes - each.steps_bytes for each in memory)
        if self.on_cpu:
            return free * self.hosts // (len(memory) * self.nodes)
        parts = [
            int(device.total_bytes * share) - each.used_bytes - each.steps_bytes
            for device, each in zip(self.ranks, memory, strict=True)
        ]
        return max(0, min(free, *parts))


def library_bytes(ranks: int) -> int:
    """GPU memory of a rank that torch does not count, where it cannot be measured."""
    return CONTEXT_BYTES + (_NCCL_BYTES if ranks > 1 else 0)


def bytes_per_block(
    spec: DecoderSpec, block_size: int, dtype: object, tp_size: int = 1, tp_rank: int = 0
) -> int:
    """Bytes of one block on one rank, over all layers.

    ``dtype`` is a torch dtype or its name.
    """
    layout = kv_layout(spec, str(dtype).removeprefix("torch."), tp_rank, tp_size)
    return block_size * token_bytes(layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """An ``EngineConfig`` with every default resolved."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_cache_max_blocks: int | None


def check_context(config: EngineConfig, context: int) -> None:
    """Raise ``StartupError`` if ``--max-model-len`` exceeds the model's own limit in tokens."""
    if config.max_model_len is not None and config.max_model_len > context:
        raise StartupError(
            f"--max-model-len {config.max_model_len} exceeds the model's context of {context} "
            f"tokens; lower it"
        )


def check_gpu_memory(
    config: EngineConfig, device: NodeDevice, memory: Sequence[RankMemory]
) -> None:
    """Raise ``StartupError`` if a GPU has no room for weights, steps, and one sequence of
    ``--max-model-len`` or a block; no-op on CPUs."""
    if device.on_cpu:
        return
    share = device.gpu_share(config)
    for gpu, each in zip(device.ranks, memory, strict=True):
        least = -(-(config.max_model_len or 2) // config.block_size) * each.bytes_per_block
        rest = f"a step {_gib(each.step_bytes)}, CUDA graphs {_gib(each.graph_bytes)}, and the "
        rest += f"smallest KV cache {_gib(least)}"
        smaller = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
        needed = each.used_bytes + each.steps_bytes + least
        if needed > gpu.total_bytes * share:
            works = math.ceil(100 * needed / gpu.total_bytes) / 100
            remedy = f"use {works:g} or more, or {smaller}"
            if works > 1 / device.nodes:
                remedy = f"split the model over more GPUs (--d), quantise it (--isq), or {smaller}"
            raise StartupError(
                f"--gpu-memory-utilization {share:g} is {_gib(int(gpu.total_bytes * share))} of "
                f"{gpu.name}, but the weights and CUDA take {_gib(each.used_bytes)}, {rest}; "
                f"{remedy}{_sharing(device)}"
            )
        if each.steps_bytes + least > each.free_bytes:
            raise StartupError(
                f"only {_gib(each.free_bytes)} of {gpu.name} are free beside the weights, but "
                f"{rest}; stop what else uses the GPU, or {smaller}{_sharing(device)}"
            )


def resolve_engine(
    config: EngineConfig,
    *,
    context: int,
    bytes_per_block: int,
    free_bytes: int,
    device: NodeDevice,
) -> ResolvedEngine:
    """Plan the KV cache from the model and the memory of the smallest rank.

    ``context`` is the model's own limit in tokens; ``bytes_per_block`` counts all layers of one
    rank, and ``free_bytes`` is available for its cache. Raises ``StartupError`` when not even one
    sequence of two tokens fits.
    """
    check_context(config, context)
    length = config.max_model_len or context
    share, fixed = _cache_share(config, device)
    on_cpu = device.on_cpu or config.kv_fraction is not None
    knob = "--kv-fraction" if on_cpu else "--gpu-memory-utilization"
    affordable = int(free_bytes * share) // bytes_per_block
    max_num_seqs = config.max_num_seqs or device.max_num_seqs
    full_blocks = -(-length // config.block_size) * max_num_seqs
    if config.num_blocks is not None:
        blocks = config.num_blocks
        room = free_bytes // bytes_per_block
        if blocks > room:
            raise StartupError(
                f"--num-gpu-blocks-override {blocks} needs {blocks * bytes_per_block} bytes, but "
                f"{free_bytes} are free; use at most {room}{_sharing(device)}"
            )
    else:
        blocks = affordable if fixed else min(affordable, full_blocks)
    if blocks * config.block_size < 2:
        raise StartupError(
            f"no memory for one KV block: a block takes {bytes_per_block} bytes and "
            f"{int(free_bytes * share)} are allowed; raise {knob} or free memory"
            f"{_sharing(device)}"
        )
    slots = blocks * config.block_size
    if slots < length:
        if config.max_model_len is not None:
            raise StartupError(
                f"--max-model-len {length} needs {length} token slots, but {blocks} blocks of "
                f"{config.block_size} give {slots}; lower it or raise {knob}"
                f"{_sharing(device)}"
            )
        length = slots
    limit = config.prefix_cache_max_tokens
    return ResolvedEngine(
        num_blocks=blocks,
        block_size=config.block_size,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or device.token_budget,
        prefix_cache_max_blocks=None if limit is None else limit // config.block_size,
    )


def _cache_share(config: EngineConfig, device: NodeDevice) -> tuple[float, bool]:
    """The fraction of the available memory to use, and whether the user set it."""
    if config.kv_fraction is not None:
        return config.kv_fraction, True
    if config.gpu_memory_utilization is not None and not device.on_cpu:
        return 1.0, True
    return device.cache_fraction, False


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _sharing(device: NodeDevice) -> str:
    if device.nodes == 1:
        return ""
    return f", or let fewer nodes share the device (--nodes-per-device is {device.nodes})"
