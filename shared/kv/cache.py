"""The cache tensors of one rank, and how KV leaves and enters them for a handoff.

What a layer keeps is its ``KVSpec``: K and V, or one latent for both. Head-major: each of these
sides is [heads, slots, dim]. A sequence with consecutive blocks is attended through a view, each
head's context is one contiguous run, and the wire's canonical [side][head][token][dim] is copied in
long runs.
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

# With more runs than this, one indexed copy is cheaper than a copy for each run.
_MAX_RUNS = 8

# torch's tensor, or anything with the buffer protocol (bytes, memoryview, shared memory, numpy).
Buffer = Any


@dataclass(frozen=True, slots=True)
class Blocks:
    """All slots of blocks, in the order of their ``numbers``."""

    numbers: np.ndarray


class KVCache:
    """What every layer keeps, for ``num_blocks`` blocks: this rank's heads only."""

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
        kept = [layer.attention.kv for layer in spec.layers]
        self.sides = [kv.sides for kv in kept]
        # Global numbers of the heads that this rank holds, by layer.
        self.heads = [kv.heads_of(tp_rank, tp_size) for kv in kept]
        self.layers = [
            tuple(self._empty(len(heads), kv.dim) for _ in kv.sides)
            for heads, kv in zip(self.heads, kept, strict=True)
        ]

    def _empty(self, heads: int, dim: int) -> torch.Tensor:
        """Zeros, so that no slot ever holds a stray NaN."""
        shape = (heads, self.num_blocks * self.block_size, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # torch fills zeros at once; numpy's cost neither time nor memory until they are written,
        # and they lie on huge pages, which makes attention over a long context faster.
        memory = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(memory).view(self.dtype).view(shape)

    def packed_bytes(self, layer: int, tokens: int, heads: range | None = None) -> int:
        """The size of ``tokens`` tokens of one layer in the canonical layout."""
        sides = self.layers[layer]
        count = len(self._local(layer, heads))
        return len(sides) * count * tokens * sides[0].shape[2] * self.dtype.itemsize

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
        """Copy tokens first to end into ``out`` as [side][head][token][dim], converted to ``dtype``
        (what e4m3 cannot hold becomes its largest value).

        ``heads`` are global head numbers among those held here; all of them by default, and the
        cache's own type.
        """
        local = self._local(layer, heads)
        packed = self._canonical(layer, len(local), end_token - first_token, out, dtype)
        for at, slots in self._runs(block_table, first_token, end_token):
            if isinstance(slots, Blocks) and self._are_copied_as_bytes(packed):
                for whole, blocks in self._as_bytes(layer, local, packed[:, :, at]):
                    # In its default mode, numpy takes into a copy first.
                    np.take(blocks, slots.numbers, axis=1, out=whole, mode="clip")
                continue
            which = self._slots(slots)
            for side, cached in zip(packed, self.layers[layer], strict=True):
                held = cached[local.start : local.stop]
                taken = indexable(held)[:, which].view(self.dtype)
                side[:, at].copy_(castable(taken, side.dtype))

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
                    blocks[:, slots.numbers] = whole
                continue
            which = self._slots(slots)
            for side, cached in zip(packed, self.layers[layer], strict=True):
                held = cached[local.start : local.stop]
                indexable(held)[:, which] = indexable(side[:, at]).to(self.device)

    def _are_copied_as_bytes(self, packed: torch.Tensor) -> bool:
        """Whether whole blocks can be: torch would index token by token, at half the speed."""
        on_host = self.device.type == packed.device.type == "cpu"
        return on_host and packed.dtype == self.dtype

    def _as_bytes(
        self, layer: int, local: range, packed: torch.Tensor
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each side, what is packed of whole blocks and what is cached of all blocks, both as
        [heads, blocks, bytes]."""
        for side, cached in zip(_bytes_of(packed), self.layers[layer], strict=True):
            held = _bytes_of(cached[local.start : local.stop])
            heads, tokens, width = side.shape
            block = self.block_size * width
            yield (
                side.reshape(heads, tokens // self.block_size, block),
                held.reshape(heads, self.num_blocks, block),
            )

    def _local(self, layer: int, heads: range | None) -> range:
        """Global head numbers as indices into this rank's tensors."""
        held = self.heads[layer]
        if heads is None:
            return range(len(held))
        if heads.start < held.start or heads.stop > held.stop:
            raise ValueError(
                f"heads {heads} of layer {layer} are not all here; this rank has {held}"
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
        """The buffer seen as [sides, heads, tokens, dim]."""
        dtype = dtype or self.dtype
        sides, dim = len(self.layers[layer]), self.layers[layer][0].shape[2]
        raw = buffer if isinstance(buffer, torch.Tensor) else _as_tensor(buffer)
        raw = raw.view(-1).view(torch.uint8)
        wanted = sides * heads * tokens * dim * dtype.itemsize
        if raw.numel() != wanted:
            raise ValueError(
                f"{raw.numel()} bytes for {tokens} tokens of layer {layer}; it takes {wanted}"
            )
        return raw.view(dtype).view(sides, heads, tokens, dim)

    def _runs(
        self, table: Sequence[int], first: int, end: int
    ) -> Iterator[tuple[slice, slice | Blocks]]:
        """Pairs of (tokens counted from ``first``, their slots): runs of consecutive slots, or all
        whole blocks at once if there would be too many."""
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
            if whole.numbers.max() >= self.num_blocks:
                raise IndexError(f"block {whole.numbers.max()} of {self.num_blocks}")
            yield slice(start * size - first, stop * size - first), whole
            runs = [
                [token, table[token // size] * size + token % size, length]
                for token, length in ((first, -first % size), (stop * size, end % size))
                if length
            ]
        for token, slot, length in runs:
            yield slice(token - first, token - first + length), slice(slot, slot + length)

    def _slots(self, slots: slice | Blocks) -> slice | torch.Tensor:
        """What torch indexes by."""
        if isinstance(slots, slice):
            return slots
        blocks = torch.from_numpy(slots.numbers).to(self.device)
        within = torch.arange(self.block_size, device=self.device)
        return (blocks[:, None] * self.block_size + within).view(-1)


def _bytes_of(x: torch.Tensor) -> np.ndarray:
    """The same memory, as bytes."""
    return x.view(torch.uint8).numpy()


class _Writable:
    """A buffer's memory as numpy's array interface, declared writable: torch warns about read-only
    memory, and data that is only read from must not cost a copy for that."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def _as_tensor(buffer: Buffer) -> torch.Tensor:
    """The bytes of a buffer as a tensor that shares its memory."""
    return torch.from_numpy(np.asarray(_Writable(np.frombuffer(buffer, dtype=np.uint8))))
