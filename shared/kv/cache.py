"""Cache tensors of one rank, and packing of their KV for a handoff.

Each component of a layer (``layout.py``) is a head-major tensor [heads, slots, dim]. A sequence
with consecutive blocks is attended through a view, each head's context is one contiguous run, and
the wire's canonical [component][head][token][dim] is copied in long runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels.fp8 import castable, indexable
from ...kernels.operators import Operators
from ...kernels.scaled import CachedKV, ScaledKV, TensorScaledKV
from ...kernels.signatures import LayerKV
from ..models.spec import DecoderSpec
from .host_copies import HostCopies, TokenSpan
from .layout import UNSCALED, KVComponent, LayerLayout, WholeScales, kv_layout, scales_in

# With more runs than this, one indexed copy is cheaper than a copy per run.
_MAX_RUNS = 8
# Compiled copies write whole cache lines.
_LINE = 64

# A torch tensor, or anything with the buffer protocol (bytes, memoryview, shared memory, numpy).
Buffer = Any
# Token slots.
Index = slice | torch.Tensor


class KVCache:
    """``num_blocks`` blocks of every layer's KV, for this rank's heads. A ``CachePort``."""

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
        operators: Operators | None = None,
        whole_scales: WholeScales = UNSCALED,
    ) -> None:
        """Blocks are copied by ``operators``, by default with numpy and torch."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_dtype = str(dtype).removeprefix("torch.")
        self.layout = kv_layout(spec, self.kv_dtype, tp_rank, tp_size, whole_scales)
        self._is_scaled = bool(scales_in(self.layout))
        self.layers = [
            tuple(self._empty(len(layer.heads), each) for each in layer.components)
            for layer in self.layout
        ]
        # The same memory, in the form that models read and write.
        self.kv = [_with_scales(*each) for each in zip(self.layout, self.layers, strict=True)]
        self._host: HostCopies | None = None
        operators = operators or Operators()
        if self.device.type == "cpu":
            blocks = [[self._as_blocks(each) for each in layer] for layer in self.layers]
            self._host = HostCopies(blocks, block_size, operators.prepare_block_copies())
        rows = {each.shape[2] * each.element_size() for layer in self.layers for each in layer}
        self._copies = operators.prepare_slot_copies(frozenset(rows), self.device)

    def _empty(self, heads: int, component: KVComponent) -> torch.Tensor:
        """Zeros, so that no slot ever holds a stray NaN."""
        shape = (heads, self.num_blocks * self.block_size, component.dim)
        dtype = torch_dtype(component.dtype)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # torch fills zeros eagerly; numpy's cost neither time nor memory until they are written,
        # and are on huge pages, which makes attention over a long context faster.
        size = math.prod(shape) * dtype.itemsize
        memory = np.zeros(size + _LINE, dtype=np.uint8)
        start = -memory.ctypes.data % _LINE
        return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)

    def pack(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: Buffer,
        heads: range | None = None,
        dtype: str | None = None,
        whole_scales: Sequence[float] = (),
    ) -> None:
        """Copy tokens first to end to ``out`` in the canonical layout.

        Values are converted to ``dtype`` with ``whole_scales``, by default the cache's own; those
        beyond e4m3's range are clamped.

        ``heads`` are global indices among the heads on this rank, by default all of them.
        """
        local = self._local(layer, heads)
        into = self.layout[layer]
        if dtype is not None and (dtype != self.kv_dtype or self._is_scaled or whole_scales):
            into = into.as_dtype(dtype, whole_scales)
        as_is = into == self.layout[layer]
        tokens = end_token - first_token
        if as_is and self._host is not None and not isinstance(out, torch.Tensor):
            buffer = np.frombuffer(out, dtype=np.uint8)
            self._check_size(len(buffer), layer, into, len(local), tokens)
            span = TokenSpan(layer, local, block_table, first_token, end_token)
            self._host.pack(span, buffer)
            return
        # Without it, an indexed copy would allocate memory for autograd.
        with torch.inference_mode():
            packed = self._packed(layer, into, len(local), tokens, out)
            cached = [each[local.start : local.stop] for each in self.layers[layer]]
            for at, index in self._runs(block_table, first_token, end_token):
                out_parts = [each[:, at] for each in packed]
                if as_is:
                    for source, target in zip(cached, out_parts, strict=True):
                        if isinstance(index, slice):
                            target.copy_(source[:, index])
                        else:
                            self._copies.gather(source, index, target)
                else:
                    self._convert(layer, cached, index, into, out_parts)
            self._finish()

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> None:
        """The inverse of ``pack`` in the cache's own dtype."""
        local = self._local(layer, heads)
        tokens = end_token - first_token
        if self._host is not None and not isinstance(data, torch.Tensor):
            buffer = np.frombuffer(data, dtype=np.uint8)
            self._check_size(len(buffer), layer, self.layout[layer], len(local), tokens)
            span = TokenSpan(layer, local, block_table, first_token, end_token)
            self._host.scatter(span, buffer)
            return
        with torch.inference_mode():
            packed = self._packed(layer, self.layout[layer], len(local), tokens, data)
            for at, index in self._runs(block_table, first_token, end_token):
                for source, component in zip(packed, self.layers[layer], strict=True):
                    target = component[local.start : local.stop]
                    if isinstance(index, slice):
                        target[:, index].copy_(source[:, at])
                    else:
                        self._copies.scatter(target, index, source[:, at])
            self._finish()

    def _convert(
        self,
        layer: int,
        cached: list[torch.Tensor],
        index: Index,
        into: LayerLayout,
        out: list[torch.Tensor],
    ) -> None:
        """Write some tokens' values in the dtype of another layout."""
        rows = tuple(indexable(each)[:, index].view(each.dtype) for each in cached)
        sources = _with_scales(self.layout[layer], rows)
        for source, target in zip(sources, _with_scales(into, tuple(out)), strict=True):
            values = source if isinstance(source, torch.Tensor) else source.dequantized()
            if isinstance(target, torch.Tensor):
                target.copy_(castable(values, target.dtype))
            else:
                target.write(values)

    def _finish(self) -> None:
        """Wait until the GPU, if any, no longer uses the buffer or the blocks."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _as_blocks(self, x: torch.Tensor) -> np.ndarray:
        """View [heads, slots, dim] as bytes, [heads, blocks, bytes]."""
        heads, slots, dim = x.shape
        block = self.block_size * dim * x.dtype.itemsize
        return _bytes_of(x).reshape(heads, slots // self.block_size, block)

    def _local(self, layer: int, heads: range | None) -> range:
        """Convert global head indices to indices into this rank's tensors."""
        own = self.layout[layer].heads
        if heads is None:
            return range(len(own))
        if heads.start < own.start or heads.stop > own.stop:
            raise ValueError(
                f"heads {heads} of layer {layer} are not all on this rank, which has {own}"
            )
        return range(heads.start - own.start, heads.stop - own.start)

    def _check_size(
        self, size: int, layer: int, layout: LayerLayout, heads: int, tokens: int
    ) -> None:
        expected = heads * tokens * layout.head_bytes
        if size != expected:
            raise ValueError(
                f"{size} bytes for {tokens} tokens of layer {layer}, expected {expected}"
            )

    def _packed(
        self, layer: int, layout: LayerLayout, heads: int, tokens: int, buffer: Buffer
    ) -> list[torch.Tensor]:
        """View a buffer in the canonical layout as [heads, tokens, dim] of each component."""
        raw = buffer if isinstance(buffer, torch.Tensor) else _as_tensor(buffer)
        raw = raw.view(-1).view(torch.uint8)
        self._check_size(raw.numel(), layer, layout, heads, tokens)
        views, at = [], 0
        for component in layout.components:
            end = at + heads * tokens * component.bytes
            values = raw[at:end].view(torch_dtype(component.dtype))
            views.append(values.view(heads, tokens, component.dim))
            at = end
        return views

    def _runs(self, table: Sequence[int], first: int, end: int) -> Iterator[tuple[slice, Index]]:
        """Yield pairs of (tokens counted from ``first``, slots): runs of consecutive slots, or
        all at once if there would be too many."""
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
            yield slice(0, end - first), self._slots(table, first, end)
            return
        for token, slot, length in runs:
            yield slice(token - first, token - first + length), slice(slot, slot + length)

    def _slots(self, table: Sequence[int], first: int, end: int) -> torch.Tensor:
        """The slot of each token. Raises ``IndexError``: a GPU would report a bad index too
        late."""
        size = self.block_size
        start, stop = first // size, -(-end // size)
        blocks = torch.tensor(table[start:stop])
        if blocks.max() >= self.num_blocks:
            raise IndexError(f"block {blocks.max()} of {self.num_blocks}")
        blocks = blocks.to(self.device)
        within = torch.arange(size, device=self.device)
        slots = (blocks[:, None] * size + within).view(-1)
        return slots[first - start * size : end - start * size]


def _with_scales(layout: LayerLayout, tensors: tuple[torch.Tensor, ...]) -> LayerKV:
    """A layer's value components, each with its scales if it has any."""
    scales = {
        each.scales: tensor
        for each, tensor in zip(layout.components, tensors, strict=True)
        if each.scales
    }
    return tuple(
        _scaled(each, tensor, scales.get(each.name))
        for each, tensor in zip(layout.components, tensors, strict=True)
        if not each.scales
    )


def _scaled(component: KVComponent, values: torch.Tensor, scales: torch.Tensor | None) -> CachedKV:
    if scales is not None:
        return ScaledKV(values, scales)
    return values if component.scale == 1.0 else TensorScaledKV(values, component.scale)


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


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
