"""A rank's runner on torch's ``meta`` device, and what it has a GPU do.

Code takes a GPU's branches there and computes nothing. Triton's kernels are not launched, but
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.kernels.attention_metadata import AttentionConfig
from tandem.kernels.gpu import fused_trial, norm
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.signatures import StageInputs
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.runners import build_runner

META = torch.device("meta")
# Operators that only make room.
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "detach_", "_unsafe_view"}
SCALARS = {"is_nonzero", "item", "_local_scalar_dense"}
# Kernels of few rows, and what torch launches instead of them for more.
TORCHS = {"_multiply_skinny": "linear"}


@dataclass
class DeviceWork:
    """The work of one part of a step for the device."""

    kernels: list[str] = field(default_factory=list)
    allocations: int = 0
    uploads: int = 0
    downloads: int = 0

    def clear(self) -> None:
        """Begin anew."""
        self.kernels.clear()
        self.allocations = self.uploads = self.downloads = 0


class Uploads(TorchFunctionMode):
    """Counts tensors made of Python's numbers, which torch's dispatcher does not show."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        self.work.uploads += func is torch.tensor and options.get("device") == META
        return func(*args, **options)


class Recorder(TorchDispatchMode):
    """Counts kernels, allocations and copies. Refuses what the host would wait for."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        name = func.overloadpacket.__name__
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        target = next((d for d in (*args, *options.values()) if isinstance(d, torch.device)), None)
        waits = name in SCALARS or name == "nonzero" or (target is not None and target != META)
        if source is not None and source.device == META:
            if waits and name == "zeros_like":  # of ``to_host``
                self.work.downloads += 1
                return func(*args, **options)
            assert not waits, f"the host waits for the device: {name}"
        result = func(*args, **options)
        self.work.allocations += len(memory_of(result).keys() - memory_of((args, options)))
        host = set() if target == META else {"zeros"}  # that is the host's own work
        if name == "copy_":
            source, target = args[1], args[0].device
        if source is not None and source.device != META and target == META:
            self.work.uploads += 1
        elif name not in FREE | host and (name.endswith("_") or not _shares_memory(result, source)):
            self.work.kernels.append(name)
            if name == "rms_norm" and source is not None and not source.is_contiguous():
                self.work.kernels.append("contiguous")
        return result


def memory_of(values: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of the device that tensors among these values have."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    storages = (each.untyped_storage() for each in tensors if each.device == META)
    return {each._cdata: each for each in storages}


def _shares_memory(result: Any, source: torch.Tensor | None) -> bool:
    """Return whether an operator returned its argument, or views of it."""
    results = result if isinstance(result, (list, tuple)) else [result]
    if source is None:
        return False
    storage = source.untyped_storage()._cdata
    return all(each.untyped_storage()._cdata == storage for each in results)


class OnGpu(GpuOperators):
    """Operators of a GPU with Triton."""

    def __init__(self, work: DeviceWork) -> None:
        super().__init__()
        self.work = work

    def prepare_batched_decode(self, config: AttentionConfig) -> bool:
        return True

    def prepare_step_inputs(self, device: torch.device) -> StageInputs:
        return lambda *_: self.work.kernels.append("stage")

    def prepare_batched_chunks(self, config: AttentionConfig) -> bool:
        return True


@contextmanager
def runner_on_gpu(folder: Path, kv_dtype: str = "auto") -> Iterator[tuple[ModelRunner, DeviceWork]]:
    """A runner with dummy weights, and what it does on the device."""
    work = DeviceWork()
    with launches_counted(work):
        runner = build_runner(
            folder,
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            device=META,
            num_blocks=400,
            load_format="dummy",
            operators=OnGpu(work),
        )
        assert runner.batched_decode
        yield runner, work


@contextmanager
def launches_counted(work: DeviceWork) -> Iterator[None]:
    """Count Triton's kernels instead of launching them."""
    trials = fused_trial.norm_works, fused_trial.activation_works, fused_trial.rope_works
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            type(norm._rms_norm),
            "run",
            lambda kernel, *_, **__: work.kernels.append(
                TORCHS.get(kernel.fn.__name__, kernel.fn.__name__)
            ),
        )
        for trial in trials:
            trial.cache_clear()
        yield
    for trial in trials:
        trial.cache_clear()
