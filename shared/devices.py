"""What ranks run on, as they report it, and all that a node decides by it.

A head never loads torch, so it cannot know whether ``--device auto`` will be a GPU. It asks its
ranks before it plans anything; options that are given win over what is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CPU = "cpu"
CUDA = "cuda"

# What CUDA and its libraries take of a GPU for each process, and NCCL beside them where ranks talk
# to each other: torch counts neither.
_CONTEXT_BYTES = 512 << 20
_NCCL_BYTES = 1 << 30
# What a step needs beside weights and cache: a chunk's activations, and sampling from a vocabulary.
_STEP_BYTES = 3 << 29


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Where a rank computes, before anything is loaded. ``kind`` is torch's word."""

    kind: str
    name: str
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        free, total = self.free_bytes / (1 << 30), self.total_bytes / (1 << 30)
        return f"{self.name}: {free:.1f} of {total:.1f} GiB are free"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory once its weights are loaded. ``free_bytes`` are what the device has left;
    ``taken_bytes`` is what the rank itself has or will have, beside the cache."""

    free_bytes: int
    taken_bytes: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """What the ranks of a node run on, which is of one kind. ``nodes`` share each device."""

    ranks: tuple[RankDevice, ...]
    nodes: int = 1

    @property
    def on_cpu(self) -> bool:
        return self.ranks[0].kind == CPU

    @property
    def token_budget(self) -> int:
        """Tokens of one step. More of them keep a GPU busy, and make a CPU's streams wait."""
        return 512 if self.on_cpu else 2048

    @property
    def cache_fraction(self) -> float:
        """How much of what the nodes may share goes to their caches."""
        # A CPU's memory is the whole machine's, which does other things too.
        return min(0.3 * self.nodes, 0.6) if self.on_cpu else 0.9

    def cache_bytes(self, memory: Sequence[RankMemory], utilization: float | None = None) -> int:
        """What a cache may take at most, on the rank that has the least.

        ``utilization`` is the share of each GPU that the node may use for everything; without it,
        nodes on one device have equal parts.
        """
        free = min(each.free_bytes for each in memory)
        if self.on_cpu:
            return free // (len(memory) * self.nodes)
        parts = [
            self._part(device, each, utilization)
            for device, each in zip(self.ranks, memory, strict=True)
        ]
        return max(0, min(free, *parts))

    def _part(self, device: RankDevice, memory: RankMemory, utilization: float | None) -> int:
        """What this node's part of a GPU leaves for the cache. It does not depend on how far other
        nodes have come, which start at the same time."""
        libraries = _CONTEXT_BYTES + (_NCCL_BYTES if len(self.ranks) > 1 else 0)
        taken = memory.taken_bytes + libraries
        if utilization is None:
            return device.total_bytes // self.nodes - taken
        return int(device.total_bytes * utilization) - taken - _STEP_BYTES
