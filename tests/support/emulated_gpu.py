"""A GPU emulated on a CPU: Triton interprets its kernels, and ``torch.cuda`` has stand-ins.

It shows that code for a GPU runs to its end, and computes the right numbers; never how fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tandem.kernels.gpu import (
    chunk_trial,
    decode_trial,
    fused_trial,
    grouped_experts,
    latent_trial,
    quantized_trial,
    routing_trial,
    skinny_trial,
    step_inputs_trial,
)
from tandem.kernels.gpu.operators import GpuOperators
from tandem.shared.engine.rank.gpu_sampler import GpuSampler
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.runners import build_runner

# ``setattr``, or that of a test, which undoes it.
SetAttribute = Callable[[Any, str, Any], None]
_TRIALS = (
    (decode_trial, "works"),
    (fused_trial, "norm_works"),
    (fused_trial, "activation_works"),
    (fused_trial, "rope_works"),
    (step_inputs_trial, "works"),
    (chunk_trial, "works"),
    (latent_trial, "decodes"),
    (latent_trial, "takes_chunks"),
    (latent_trial, "stores"),
    (routing_trial, "works"),
    (routing_trial, "router_works"),
    (grouped_experts, "works"),
    (skinny_trial, "works"),
)


def use_kernels(set_attribute: SetAttribute) -> None:
    """Let models on a CPU compute with Triton's kernels, interpreted."""
    from tandem.kernels.gpu import paged_decode

    for module, name in _TRIALS:
        set_attribute(module, name, lambda *_, **__: True)
    # Which formats have a product depends on the dtype.
    formats = lambda kind, dtype, device: quantized_trial.has_kernel(kind, dtype)  # noqa: E731
    set_attribute(quantized_trial, "works", formats)
    set_attribute(paged_decode, "processors", lambda device: 1)  # programs are slow here


class EmulatedOperators(GpuOperators):
    """Activations have the dtype of the weights, as on a GPU."""

    def activation_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return dtype


def emulated_runner(folder: Path, **options: Any) -> ModelRunner:
    """A runner on a CPU that computes all of a step as on a GPU, after ``use_kernels``; by default
    in float32. Triton's interpreter can multiply float16, but of bfloat16 it multiplies the bits.
    """
    settings: dict[str, Any] = {"operators": EmulatedOperators(), "dtype": "float32", **options}
    runner = build_runner(folder, **settings)
    runner.slots.tables = torch.zeros_like(runner.slots.tables)  # no longer the host's
    vars(runner.inputs)["_on_cpu"] = runner.inputs._on_gpu
    runner.sampler = GpuSampler(runner.model.spec.vocab_size, runner.slots.last_tokens)
    return runner


class HostEvent:
    """Stands in for ``torch.cuda.Event``: work on a CPU is over when its launch returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds, never 0."""
        return max(1e-6, 1e3 * (later._at - self._at))


class EmptyGraph:
    """Stands in for ``torch.cuda.CUDAGraph``; the launches of its capture are made at once."""

    def replay(self) -> None:
        pass


@contextmanager
def _capturing(graph: EmptyGraph, **_: Any) -> Iterator[None]:
    yield


def use_cuda_stand_ins(set_attribute: SetAttribute) -> None:
    """Replace what tests and benchmarks for a GPU call of ``torch.cuda``."""
    stand_ins = {
        "Event": HostEvent,
        "CUDAGraph": EmptyGraph,
        "graph": _capturing,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, stand_in in stand_ins.items():
        set_attribute(torch.cuda, name, stand_in)
