"""Cache tensors of one rank, and packing of their KV for a handoff.

A layer's ``KVSpec`` names its components: K and V, or one latent for both. Each is a head-major
tensor [heads, slots, dim]. A sequence with consecutive blocks is attended through a view, each
head's context is one contiguous run, and the wire's canonical [component][head][token][dim] is
copied in long runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.fp8 import castable, indexable
from ..models.spec import DecoderSpec

# With more runs than this, one indexed copy is cheaper than a copy per run.
_MAX_RUNS = 8

# A torch tensor, or anything with the buffer protocol (bytes, memoryview, shared memory, numpy).
Buffer = Any


@dataclass(frozen=True, slots=True)
class Blocks:
    """All slots of whole blocks, in the order of ``indices``."""

    indices: np.ndarray


class KVCache:
    """``num_blocks`` blocks of every layer's KV, for this rank's heads."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        specs = [layer.attention.kv for layer in spec.layers]
        self.components = [kv.components for kv in specs]
        # Global indices of the heads on this rank, by layer.
        self.heads = [kv.heads_of(tp_rank, tp_size) for kv in specs]
        self.layers = [
            tuple(self._empty(len(heads), kv.dim) for _ in kv.components)
            for heads, kv in zip(self.heads, specs, strict=True)
        ]

    def _empty(self, heads: int, dim: int) -> torch.Tensor:
        """Zeros, so that no slot ever holds a stray NaN."""
        shape = (heads, self.num_blocks * self.block_size, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # torch fills zeros eagerly; numpy's cost neither time nor memory until they are written,
        # and are on huge pages, which makes attention over a long context faster.
        memory = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(memory).view(self.dtype).view(shape)

    def packed_bytes(self, layer: int, tokens: int, heads: range | None = None) -> int:
        """The size of ``tokens`` tokens of one layer in the canonical layout."""
        components = self.layers[layer]
        count = len(self._local(layer, heads))
        return len(components) * count * tokens * components[0].shape[2] * self.dtype.itemsize

    def pack(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: Buffer,
        heads: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy tokens first to end to ``out`` as [component][head][token][dim], converted to
        ``dtype``, by default the cache's own (values beyond e4m3's range are clamped).

        ``heads`` are global indices among the heads on this rank, by default all of them.
        """
        local = self._local(layer, heads)
        packed = self._canonical(layer, len(local), end_token - first_token, out, dtype)
        for at, slots in self._runs(block_table, first_token, end_token):
            if isinstance(slots, Blocks) and self._are_copied_as_bytes(packed):
                for whole, blocks in self._as_bytes(layer, local, packed[:, :, at]):
                    # In its default mode, numpy takes into a copy first.
                    np.take(blocks, slots.indices, axis=1, out=whole, mode="clip")
                continue
            which = self._slots(slots)
            for component, cached in zip(packed, self.layers[layer], strict=True):
                held = cached[local.start : local.stop]
                taken = indexable(held)[:, which].view(self.dtype)
                component[:, at].copy_(castable(taken, component.dtype))

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> None:
        """The inverse of ``pack``."""
        local = self._local(layer, heads)
        packed = self._canonical(layer, len(local), end_token - first_token, data)
        for at, slots in self._runs(block_table, first_token, end_token):
            if isinstance(slots, Blocks) and self._are_copied_as_bytes(packed):
                for whole, blocks in self._as_bytes(layer, local, packed[:, :, at]):
                    _put(blocks, slots.indices, whole)
                continue
            which = self._slots(slots)
            for component, cached in zip(packed, self.layers[layer], strict=True):
                held = cached[local.start : local.stop]
                indexable(held)[:, which] = indexable(component[:, at]).to(self.device)

    def _are_copied_as_bytes(self, packed: torch.Tensor) -> bool:
        """Return whether numpy copies whole blocks, at twice the speed of torch's index copy."""
        on_host = self.device.type == packed.device.type == "cpu"
        return on_host and packed.dtype == self.dtype

    def _as_bytes(
        self, layer: int, local: range, packed: torch.Tensor
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each component, the packed whole blocks and all cached blocks, as [heads, blocks,
        bytes]."""
        for component, cached in zip(_bytes_of(packed), self.layers[layer], strict=True):
            held = _bytes_of(cached[local.start : local.stop])
            heads, tokens, width = component.shape
            block = self.block_size * width
            yield (
                component.reshape(heads, tokens // self.block_size, block),
                held.reshape(heads, self.num_blocks, block),
            )

    def _local(self, layer: int, heads: range | None) -> range:
        """Convert global head indices to indices into this rank's tensors."""
        held = self.heads[layer]
        if heads is None:
            return range(len(held))
        if heads.start < held.start or heads.stop > held.stop:
            raise ValueError(
                f"heads {heads} of layer {layer} are not all on this rank, which has {held}"
            )
        return range(heads.start - held.start, heads.stop - held.start)

    def _canonical(
        self,
        layer: int,
        heads: int,
        tokens: int,
        buffer: Buffer,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """View the buffer as [components, heads, tokens, dim]."""
        dtype = dtype or self.dtype
        components, dim = len(self.layers[layer]), self.layers[layer][0].shape[2]
        raw = buffer if isinstance(buffer, torch.Tensor) else _as_tensor(buffer)
        raw = raw.view(-1).view(torch.uint8)
        expected = components * heads * tokens * dim * dtype.itemsize
        if raw.numel() != expected:
            raise ValueError(
                f"{raw.numel()} bytes for {tokens} tokens of layer {layer}, expected {expected}"
            )
        return raw.view(dtype).view(components, heads, tokens, dim)

    def _runs(
        self, table: Sequence[int], first: int, end: int
    ) -> Iterator[tuple[slice, slice | Blocks]]:
        """Yield pairs of (tokens counted from ``first``, slots): runs of consecutive slots, or
        all whole blocks at once if there would be too many."""
        size = self.block_size
        runs: list[list[int]] = []  # token, slot, length
        for index in range(first // size, -(-end // size)):
            token = max(first, index * size)
            slot = table[index] * size + token % size
            length = min(end, (index + 1) * size) - token
            if runs and runs[-1][1] + runs[-1][2] == slot:
                runs[-1][2] += length
            else:
                runs.append([token, slot, length])
        if len(runs) > _MAX_RUNS:
            start, stop = -(-first // size), end // size
            whole = Blocks(np.asarray(table[start:stop]))
            if whole.indices.max() >= self.num_blocks:
                raise IndexError(f"block {whole.indices.max()} of {self.num_blocks}")
            yield slice(start * size - first, stop * size - first), whole
            runs = [
                [token, table[token // size] * size + token % size, length]
                for token, length in ((first, -first % size), (stop * size, end % size))
                if length
            ]
        for token, slot, length in runs:
            yield slice(token - first, token - first + length), slice(slot, slot + length)

    def _slots(self, slots: slice | Blocks) -> slice | torch.Tensor:
        """Slots as an index for torch."""
        if isinstance(slots, slice):
            return slots
        blocks = torch.from_numpy(slots.indices).to(self.device)
        within = torch.arange(self.block_size, device=self.device)
        return (blocks[:, None] * self.block_size + within).view(-1)


def _bytes_of(x: torch.Tensor) -> np.ndarray:
    """View a tensor's memory as bytes."""
    return x.view(torch.uint8).numpy()


class _Writable:
    """Array interface of a buffer, declared writable: torch warns about read-only memory, and data
    that is only read must not be copied because of that."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def _as_tensor(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a tensor of bytes that shares its memory."""
    return torch.from_numpy(np.asarray(_Writable(np.frombuffer(buffer, dtype=np.uint8))))


def _put(blocks: np.ndarray, indices: np.ndarray, whole: np.ndarray) -> None:
    """``blocks[:, indices] = whole``, a third faster: numpy moves an item of an opaque type at
    once, and indexing copies the bytes of an axis through an iterator."""
    opaque = np.dtype((np.void, blocks.shape[2]))
    for held, arrived in zip(blocks, whole, strict=True):
        np.put(held.view(opaque), indices, arrived.view(opaque), mode="clip")
