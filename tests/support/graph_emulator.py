"""CUDA graphs without CUDA: records what a function launches, and repeats it.

Recorded are torch's operators and Triton's kernels, as they run on a CPU: each repetition runs the
same ones with the same numbers on the same memory, whatever that holds by then. So a result that
depends on a number or a tensor of the captured step is wrong in the next one, as it would be on a
GPU. What a capture forbids is an error: to wait for the device, and to read memory that the host
filled meanwhile, since a GPU would find it stale or freed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from tandem.tests.support.ranks import ThreadRank

WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "unique", "masked_select"}
# Methods that copy to the host, where a CPU's memory is read without an operator.
COPIES = {"tolist", "numpy", "__array__", "cpu"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class CaptureError(Exception):
    """A capture by CUDA would fail, or its repetitions be wrong."""


def storage_of(x: torch.Tensor) -> object:
    try:
        return x.untyped_storage()._cdata
    except NotImplementedError:  # a weight that oneDNN has packed
        return id(x)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []
        self.names: list[str] = []
        # Memory of a captured tensor must not be used again for another one.
        self.alive: list[torch.Tensor] = []
        self.readable = {
            # Not isinstance, which asks a weak reference's object.
            storage_of(each)
            for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor)
        }

    def check(self, name: str, values: Any) -> None:
        for each in tensors_in(values):
            if storage_of(each) not in self.readable:
                raise CaptureError(f"{name} reads {tuple(each.shape)} from the host")

    def add(self, name: str, results: Any, launch: Callable[[], object]) -> None:
        self.names.append(name)
        self.launches.append(launch)
        self.keep(results)

    def keep(self, results: Any) -> None:
        for each in tensors_in(results):
            self.readable.add(storage_of(each))
            self.alive.append(each)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            each.dtype == torch.bool for each in tensors_in(args[1:])
        )
        if name in WAITS or by_mask:
            raise CaptureError(f"{name} waits for the device")
        self.check(name, (args, options))
        results = func(*args, **options)
        owned = {storage_of(each) for each in tensors_in((args, options))}
        fresh = [each for each in tensors_in(results) if storage_of(each) not in owned]
        if name in ALLOCATIONS:
            for each in fresh:
                _poison(each)
            self.keep(fresh)
        elif not func.is_view or fresh:
            self.add(name, results, lambda: _repeat(func, args, options, results, fresh))
        return results


class _NoCopies(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in COPIES:
            raise CaptureError(f"{name} waits for the device")
        return func(*args, **kwargs or {})


def _repeat(func: Any, args: Any, options: Any, results: Any, fresh: list[torch.Tensor]) -> None:
    """Run an operator again; what it allocates is copied to where the capture had it."""
    again = func(*args, **options)
    if fresh:
        for before, now in zip(tensors_in(results), tensors_in(again), strict=True):
            if any(before is each for each in fresh):
                before.copy_(now)


def _poison(x: torch.Tensor) -> None:
    with _disable_current_modes():
        x.view(torch.uint8).fill_(0x7E) if x.numel() and x.is_contiguous() else None


class _Captures(threading.local):
    """The capture of each thread, if any."""

    recorder: _Recorder | None = None


_captures = _Captures()
_run = InterpretedFunction.run


def _run_or_record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    recorder = _captures.recorder
    if recorder is None:
        return _run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
    recorder.check(kernel.__name__, (args, kwargs))

    def launch() -> Any:
        # Rows of padding hold anything.
        with np.errstate(all="ignore"):
            return _run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    with _disable_current_modes():
        result = launch()
    recorder.add(kernel.__name__, (args, kwargs), launch)
    return result


InterpretedFunction.run = _run_or_record


class CapturedRank(ThreadRank):
    """A rank whose sums a capture records."""

    def add_all(self, x: torch.Tensor) -> None:
        recorder = _captures.recorder
        if recorder is None:
            super().add_all(x)
            return
        recorder.check("all_reduce", x)
        with _disable_current_modes():
            super().add_all(x)
        recorder.add("all_reduce", x, lambda: ThreadRank.add_all(self, x))


def emulated_capture(
    forward: Callable[[], torch.Tensor],
) -> tuple[Callable[[], object], torch.Tensor]:
    """``Capture`` of graphs.py. The result's ``launches`` are the names of what it repeats."""
    with np.errstate(all="ignore"):
        forward()
    recorder = _captures.recorder = _Recorder()
    try:
        with recorder, _NoCopies():
            hidden = forward()
    finally:
        _captures.recorder = None
    return Replay(recorder), hidden


class Replay:
    """Repeats what was recorded."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    @property
    def launches(self) -> list[str]:
        return self._recorder.names

    def __call__(self) -> None:
        for launch in self._recorder.launches:
            launch()
