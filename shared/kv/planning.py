"""Planning of the KV cache: the devices that ranks report, and how many blocks fit there.

A head never loads torch, so it cannot know whether ``--device auto`` is a GPU: it plans from its
ranks' reports. Explicit options override the defaults here.
"""

from __future__ import annotations

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
_CONTEXT_BYTES = 512 << 20
_NCCL_BYTES = 1 << 30
# Memory of a step besides weights and cache: a chunk's activations, sampling, and graphs.
_STEP_BYTES = 3 << 30


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
    """A rank's memory once its weights are loaded. ``free_bytes`` is free on the device;
    ``used_bytes`` is for the rank itself, now or later, besides the cache."""

    free_bytes: int
    used_bytes: int
    bytes_per_block: int


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
        """The fraction of the shared memory that goes to caches."""
        # A CPU's memory is the whole machine's, which has other uses too.
        return min(0.3 * self.nodes, 0.6) if self.on_cpu else 0.9

    def cache_bytes(self, memory: Sequence[RankMemory], utilization: float | None = None) -> int:
        """The maximum size of a cache, on the rank with the least memory.

        ``utilization`` is the fraction of each GPU that the node may use, cache and all else;
        without it, the nodes on a device get equal parts.
        """
        free = min(each.free_bytes for each in memory)
        if self.on_cpu:
            return free * self.hosts // (len(memory) * self.nodes)
        parts = [
            self._part(device, each, utilization)
            for device, each in zip(self.ranks, memory, strict=True)
        ]
        return max(0, min(free, *parts))

    def _part(self, device: RankDevice, memory: RankMemory, utilization: float | None) -> int:
        """The cache's share of this node's part of a GPU, independent of other nodes that are
        starting at the same time."""
        libraries = _CONTEXT_BYTES + (_NCCL_BYTES if len(self.ranks) > 1 else 0)
        used = memory.used_bytes + libraries + _STEP_BYTES
        share = 1 / self.nodes if utilization is None else utilization
        return int(device.total_bytes * share) - used


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
            f"{int(free_bytes * share)} are allowed; raise --kv-fraction or free memory"
            f"{_sharing(device)}"
        )
    slots = blocks * config.block_size
    if slots < length:
        if config.max_model_len is not None:
            raise StartupError(
                f"--max-model-len {length} needs {length} token slots, but {blocks} blocks of "
                f"{config.block_size} give {slots}; lower it or raise --kv-fraction"
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


def _sharing(device: NodeDevice) -> str:
    if device.nodes == 1:
        return ""
    return f", or let fewer nodes share the device (--nodes-per-device is {device.nodes})"
