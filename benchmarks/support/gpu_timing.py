"""Times of work on a GPU, by events, and what the GPU itself can do.

``--device emulation`` on the command line of a benchmark lets it run on a CPU as a smoke test:
Triton's kernels are interpreted, and ``torch.cuda`` has stand-ins. Import this module before any
kernel.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

EMULATED = "emulation" in sys.argv
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if EMULATED:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402  # after the settings above

if EMULATED:
    from tandem.tests.support.emulated_gpu import use_cuda_stand_ins

    use_cuda_stand_ins(setattr)

DEVICE = torch.device("cpu" if EMULATED else "cuda")
# Triton's interpreter multiplies the bits of bfloat16.
DTYPE = torch.float32 if EMULATED else torch.bfloat16
ROUNDS = 1 if EMULATED else 15
_WARM_UP = 3
# Memory that no GPU's L2 cache holds.
UNCACHED_BYTES = 1 << (18 if EMULATED else 28)


def seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median time between events around ``work``, its launches included."""
    for _ in range(1 if EMULATED else _WARM_UP):
        work()
    return statistics.median(_between_events(work) for _ in range(rounds))


def graph_seconds(works: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> float:
    """The median time of one of ``works``, whose kernels one graph launches together."""
    for work in works:
        work()  # compiles; a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [work() for work in works]
    duration = seconds(graph.replay, rounds) / len(works)
    del results
    return duration


def _between_events(work: Callable[[], Any]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


@dataclass(frozen=True)
class GpuLimits:
    """Bytes a second of a large copy, read and written; FLOP a second of a large product."""

    copy: float
    product: float


@cache
def limits() -> GpuLimits:
    """What the GPU does now, in this process."""
    source = torch.ones(4 * UNCACHED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    size = 64 if EMULATED else 8192
    a, b = torch.randn(2, size, size, device=DEVICE).to(DTYPE)
    return GpuLimits(copied, 2 * size**3 / seconds(lambda: a @ b))


def release() -> None:
    """Return memory that torch keeps to the GPU, for other processes."""
    import gc

    gc.collect()
    torch.cuda.empty_cache()
