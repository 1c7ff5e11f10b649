"""Copies of whole blocks between the KV cache and a buffer: ``BlockCopies``.

One core accesses memory in random order at a fraction of its sequential speed. Two things help that
libraries do not do for copies of a few KiB: the first lines of a piece are prefetched two pieces
ahead, after which the CPU's own prefetcher continues, and writes to the KV cache bypass the CPU's
caches, so that no line is fetched only to be overwritten. A received prompt's KV is larger than the
CPU's caches, and would evict the data of concurrent decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..reference.cache import NumpyBlockCopies
from .jit import kernel

LINE = 64
# Pieces to prefetch ahead, and the lines of each: enough to start the CPU's own prefetcher.
_AHEAD, _FIRST_LINES = 2, 4

_WORD = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_LINE = ir.VectorType(ir.IntType(64), LINE // 8)


@intrinsic
def _request(typing: Any, address: Any) -> Any:
    """Prefetch a line."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _WORD, _WORD, _WORD])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        read, keep, data = (ir.Constant(_WORD, number) for number in (0, 3, 1))
        builder.call(prefetch, [builder.inttoptr(args[0], _BYTES), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _line_copy(*, stream: bool) -> Callable[..., Any]:
    @intrinsic
    def copy(typing: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            into, out_of = (builder.inttoptr(each, _LINE.as_pointer()) for each in args)
            line = builder.load(out_of)
            line.align = 1
            store = builder.store(line, into)
            store.align = LINE if stream else 1
            if stream:
                hint = builder.module.add_metadata([ir.Constant(_WORD, 1)])
                store.set_metadata("nontemporal", hint)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return copy


_copy_line = _line_copy(stream=False)
# A non-temporal store of a whole line.
_stream_line = _line_copy(stream=True)


@intrinsic
def _finish_streams(typing: Any) -> Any:
    """Order streamed lines before this thread's next writes, for other threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@kernel()
def _gather(
    cached: int,
    cache_step: int,
    out: int,
    out_step: int,
    heads: int,
    indices: np.ndarray,
    size: int,
) -> None:
    count = len(indices)
    for head in range(heads):
        source, target = cached + head * cache_step, out + head * out_step
        for i in range(count):
            later = source + indices[min(i + _AHEAD, count - 1)] * size
            for at in range(0, min(size, _FIRST_LINES * LINE), LINE):
                _request(later + at)
            piece = source + indices[i] * size
            for at in range(0, size, LINE):
                _copy_line(target + at, piece + at)
            target += size


@kernel()
def _scatter(
    cached: int,
    cache_step: int,
    data: int,
    data_step: int,
    heads: int,
    indices: np.ndarray,
    size: int,
) -> None:
    for head in range(heads):
        target, source = cached + head * cache_step, data + head * data_step
        for i in range(len(indices)):
            piece = target + indices[i] * size
            for at in range(0, size, LINE):
                _stream_line(piece + at, source + at)
            source += size
    _finish_streams()


class CompiledBlockCopies(NumpyBlockCopies):
    """Copies blocks of whole lines with kernels, others with numpy."""

    def __init__(self) -> None:
        """Compiles the kernels, or loads them from disk."""
        block = np.zeros((1, 3, LINE), np.uint8)
        start = -block.ctypes.data % LINE
        aligned = block.reshape(-1)[start : start + LINE].reshape(1, 1, LINE)
        only = np.zeros(1, np.int64)
        self.gather(aligned, only, aligned.copy())
        self.scatter(aligned, only, aligned.copy())

    def gather(self, cached: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
        """See ``BlockCopies``."""
        if cached.shape[2] % LINE:
            super().gather(cached, indices, out)
        else:
            _gather(*_places(cached, out), indices, cached.shape[2])

    def scatter(self, cached: np.ndarray, indices: np.ndarray, data: np.ndarray) -> None:
        """See ``BlockCopies``."""
        if cached.shape[2] % LINE or cached.ctypes.data % LINE or cached.strides[0] % LINE:
            super().scatter(cached, indices, data)
        else:
            _scatter(*_places(cached, data), indices, cached.shape[2])


def _places(cached: np.ndarray, whole: np.ndarray) -> tuple[int, int, int, int, int]:
    """Addresses and distances between heads. Blocks of a head lie side by side in both."""
    for each in (cached, whole):
        assert each[0].flags.c_contiguous, (each.shape, each.strides)
    return cached.ctypes.data, cached.strides[0], whole.ctypes.data, whole.strides[0], len(cached)
