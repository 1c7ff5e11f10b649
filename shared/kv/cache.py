"""Cache tensors of one rank, and packing of their KV for a handoff.

Each component of a layer (``layout.py``) is a head-major tensor [heads, slots, dim]. A sequence
with consecutive blocks is attended through a view, each head's context is one contiguous run, and
the wire's canonical [component][head][token][dim] is copied in long runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels.fp8 import castable, indexable
from ...kernels.operators import Operators
from ...kernels.scaled import CachedKV, ScaledKV, TensorScaledKV
from ...kernels.signatures import FrameCells, LayerKV
from ...kernels.streams import marker
from ..models.spec import DecoderSpec
from .copying import Copying, finished
from .host_copies import HostCopies, TokenSpan
from .layout import UNSCALED, KVComponent, LayerLayout, WholeScales, kv_layout, scales_in

# With more runs than this, one indexed copy is cheaper than a copy per run.
_MAX_RUNS = 8
# Frames on their way from host memory to a GPU.
_ARRIVING = 4
# Block tables that are kept on the device.
_TABLES = 64
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
        self._host_copies: HostCopies
        operators = operators or Operators()
        if self.device.type == "cpu":
            blocks = [[self._as_blocks(each) for each in layer] for layer in self.layers]
            self._host_copies = HostCopies(blocks, block_size, operators.prepare_block_copies())
        self._frames = operators.prepare_frame_copies(self.layers, block_size)
        self._shapes = [tuple((each.shape, each.dtype) for each in layer) for layer in self.layers]
        # Marks what the data plane's thread has launched; ``None`` if nothing is ever under way.
        self.mark = marker(self.device)
        self._is_cuda = self.device.type == "cuda"
        self._tables: dict[int, tuple[Sequence[int], torch.Tensor]] = {}
        self._arriving: deque[Copying] = deque()

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

    def packed_bytes(self, layer: int, tokens: int, heads: range | None = None) -> int:
        """The size of ``tokens`` tokens of one layer in the canonical layout."""
        return len(self._local(layer, heads)) * tokens * self.layout[layer].head_bytes

    @property
    def sums_on_the_way(self) -> bool:
        """See ``CachePort``."""
        return self._frames.sums

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
        """``pack_frame`` of one layer, to its end."""
        layers = range(layer, layer + 1)
        self.pack_frame(
            layers, block_table, first_token, end_token, out, heads, dtype, whole_scales
        ).wait()

    def scatter(
        self,
        layer: int,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> None:
        """``scatter_frame`` of one layer, to its end."""
        layers = range(layer, layer + 1)
        self.scatter_frame(layers, block_table, first_token, end_token, data, heads).wait()

    def pack_frame(
        self,
        layers: range,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        out: Buffer,
        heads: range | None = None,
        dtype: str | None = None,
        whole_scales: Sequence[float] = (),
    ) -> Copying:
        """Copy tokens first to end of some layers to ``out`` in the canonical layout.

        Values are converted to ``dtype`` with ``whole_scales``, those of all components of the
        layers, by default the cache's own; those beyond e4m3's range are clamped.

        ``heads`` are global indices among the heads on this rank, by default all of them.
        """
        into = self._layouts_into(layers, dtype, whole_scales)
        as_is = all(into[layer] == self.layout[layer] for layer in layers)
        parts = self._parts(layers, into, heads, end_token - first_token, out)
        if as_is and self._in_host_memory(out):
            for layer, (start, end) in parts.items():
                span = TokenSpan(
                    layer, self._local(layer, heads), block_table, first_token, end_token
                )
                self._host_copies.pack(span, np.frombuffer(out, dtype=np.uint8)[start:end])
            return finished()
        # Without it, an indexed copy would allocate memory for autograd.
        with torch.inference_mode():
            raw = _raw(out)
            here = self._is_here(out, raw)
            frame = raw if here else torch.empty(len(raw), dtype=torch.uint8, device=self.device)
            sums = None
            if as_is:
                cells = self._cells(layers, block_table, first_token, end_token, heads, parts)
                for each, (start, end) in cells:
                    sums = self._frames.pack(each, frame[start:end])
                sums = sums if here and len(cells) == 1 else None
            else:
                for layer, (start, end) in parts.items():
                    self._convert(
                        layer,
                        self._local(layer, heads),
                        (block_table, first_token, end_token),
                        into[layer],
                        frame[start:end],
                    )
            if not here:
                raw.copy_(frame, non_blocking=True)
            return self._copying(sums)

    def scatter_frame(
        self,
        layers: range,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        data: Buffer,
        heads: range | None = None,
    ) -> Copying:
        """The inverse of ``pack_frame`` in the cache's own dtype. ``data`` in host memory is no
        longer used when this returns."""
        parts = self._parts(layers, self.layout, heads, end_token - first_token, data)
        if self._in_host_memory(data):
            for layer, (start, end) in parts.items():
                span = TokenSpan(
                    layer, self._local(layer, heads), block_table, first_token, end_token
                )
                self._host_copies.scatter(span, np.frombuffer(data, dtype=np.uint8)[start:end])
            return finished()
        with torch.inference_mode():
            raw = _raw(data)
            here = self._is_here(data, raw)
            frame = raw if here else self._arrived(raw)
            sums = None
            cells = self._cells(layers, block_table, first_token, end_token, heads, parts)
            for each, (start, end) in cells:
                sums = self._frames.scatter(each, frame[start:end])
            copying = self._copying(sums if here and len(cells) == 1 else None)
        if not here:
            self._arriving.append(copying)
        return copying

    def _arrived(self, data: torch.Tensor) -> torch.Tensor:
        """A frame in host memory, on its way to the GPU through pinned memory."""
        while len(self._arriving) >= _ARRIVING:
            self._arriving.popleft().wait()
        if self.mark is None:
            return data.to(self.device)
        staged = torch.empty(len(data), dtype=torch.uint8, pin_memory=self._is_cuda)
        np.copyto(staged.numpy(), data.cpu().numpy())
        # torch reuses pinned memory only when copies out of it are over.
        return staged.to(self.device, non_blocking=True)

    def _in_host_memory(self, buffer: Buffer) -> bool:
        """True if a CPU copies between two places of its memory."""
        at_once = self.mark is None and self.device.type == "cpu"
        return at_once and not isinstance(buffer, torch.Tensor)

    def _is_here(self, buffer: Buffer, raw: torch.Tensor) -> bool:
        """True if the device copies to or from a buffer directly. Where copies are under way for a
        while, buffers of the host are not tensors, and last no longer than the call."""
        is_tensor = isinstance(buffer, torch.Tensor)
        return raw.device == self.device and (is_tensor or self.mark is None)

    def _layouts_into(
        self, layers: range, dtype: str | None, whole_scales: Sequence[float]
    ) -> Sequence[LayerLayout]:
        """The layouts of frames with these layers, by the number of the layer."""
        if dtype is None or (dtype == self.kv_dtype and not self._is_scaled and not whole_scales):
            return self.layout
        into, at = list(self.layout), 0
        for layer in layers:
            count = len(self.layout[layer].values)
            into[layer] = into[layer].as_dtype(dtype, whole_scales[at : at + count])
            at += count
        return into

    def _parts(
        self,
        layers: range,
        layouts: Sequence[LayerLayout],
        heads: range | None,
        tokens: int,
        buffer: Buffer,
    ) -> dict[int, tuple[int, int]]:
        """The place of each layer in a frame, in bytes. Raises ``ValueError``."""
        parts, at = {}, 0
        for layer in layers:
            size = len(self._local(layer, heads)) * tokens * layouts[layer].head_bytes
            parts[layer] = at, at + size
            at += size
        size = buffer.nbytes if isinstance(buffer, (torch.Tensor, memoryview)) else len(buffer)
        if size != at:
            raise ValueError(
                f"{size} bytes for {tokens} tokens of layers {layers.start} to {layers.stop - 1}, "
                f"expected {at}"
            )
        return parts

    def _cells(
        self,
        layers: range,
        block_table: Sequence[int],
        first_token: int,
        end_token: int,
        heads: range | None,
        parts: dict[int, tuple[int, int]],
    ) -> list[tuple[FrameCells, tuple[int, int]]]:
        """What is copied at once, with its place in the frame: all layers, if they are alike."""
        blocks = self._blocks(block_table, end_token)
        local = [self._local(layer, heads) for layer in layers]
        alike = all(
            (each, self._shapes[layer]) == (local[0], self._shapes[layers.start])
            for layer, each in zip(layers, local, strict=True)
        )
        runs = [layers] if alike else [range(layer, layer + 1) for layer in layers]
        return [
            (
                FrameCells(run, self._local(run.start, heads), blocks, first_token, end_token),
                (parts[run.start][0], parts[run[-1]][1]),
            )
            for run in runs
        ]

    def _blocks(self, table: Sequence[int], end_token: int) -> torch.Tensor:
        """A block table on the device. A transfer's table, a tuple, is uploaded once. Raises
        ``IndexError``: a GPU would report a bad index too late."""
        known = self._tables.get(id(table))
        if known is not None and known[0] is table:
            blocks = known[1]
        else:
            host = torch.tensor(table, dtype=torch.int32)
            if len(host) and not 0 <= int(host.min()) <= int(host.max()) < self.num_blocks:
                outside = next(each for each in table if not 0 <= each < self.num_blocks)
                raise IndexError(f"block {outside} of {self.num_blocks}")
            host = host.pin_memory() if self._is_cuda else host
            blocks = host.to(self.device, non_blocking=True)
            if isinstance(table, tuple):
                self._tables[id(table)] = table, blocks
                if len(self._tables) > _TABLES:
                    del self._tables[next(iter(self._tables))]
        if len(table) * self.block_size < end_token:
            raise IndexError(f"token {end_token - 1} of {len(table)} blocks")
        return blocks

    def _copying(self, sums: torch.Tensor | None) -> Copying:
        """What was launched now."""
        if self.mark is None:
            return finished(None if sums is None else lambda: sums.cpu().numpy().tobytes())
        if sums is None:
            return Copying(self.mark())
        there = torch.empty(len(sums), dtype=sums.dtype, pin_memory=self._is_cuda)
        there.copy_(sums, non_blocking=True)
        return Copying(self.mark(), lambda: there.numpy().tobytes())

    def _convert(
        self,
        layer: int,
        heads: range,
        tokens: tuple[Sequence[int], int, int],
        into: LayerLayout,
        frame: torch.Tensor,
    ) -> None:
        """Write a layer's values in the dtype of another layout. ``tokens``: the block table, the
        first and the end."""
        cached = [each[heads.start : heads.stop] for each in self.layers[layer]]
        packed = _components(into, len(heads), tokens[2] - tokens[1], frame)
        for at, index in self._runs(*tokens):
            rows = tuple(indexable(each)[:, index].view(each.dtype) for each in cached)
            sources = _with_scales(self.layout[layer], rows)
            targets = _with_scales(into, tuple(each[:, at] for each in packed))
            for source, target in zip(sources, targets, strict=True):
                values = source if isinstance(source, torch.Tensor) else source.dequantized()
                if isinstance(target, torch.Tensor):
                    target.copy_(castable(values, target.dtype))
                else:
                    target.write(values)

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
        """The slot of each token."""
        tokens = torch.arange(first, end, device=self.device)
        blocks = self._blocks(table, end).long()[tokens // self.block_size]
        return blocks * self.block_size + tokens % self.block_size


def _raw(buffer: Buffer) -> torch.Tensor:
    """View a buffer as bytes."""
    raw = buffer if isinstance(buffer, torch.Tensor) else _as_tensor(buffer)
    return raw.view(-1).view(torch.uint8)


def _components(
    layout: LayerLayout, heads: int, tokens: int, frame: torch.Tensor
) -> list[torch.Tensor]:
    """View a layer of a frame as [heads, tokens, dim] of each component."""
    views, at = [], 0
    for component in layout.components:
        end = at + heads * tokens * component.bytes
        values = frame[at:end].view(torch_dtype(component.dtype))
        views.append(values.view(heads, tokens, component.dim))
        at = end
    return views


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
