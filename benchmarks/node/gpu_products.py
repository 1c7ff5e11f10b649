"""Quantised and expert matrix products on a GPU, against a copy and torch in bfloat16.

    python -m tandem.benchmarks.node.gpu_products [--out DIR] [--device emulation]

Each weight has the shape of an 8B model's gate projection, with enough copies to exceed the GPU's
L2 cache; all products run in one CUDA graph, so launches cost nothing. A figure is the rate at
which weight bytes are read, relative to a copy. The experts are one layer of Qwen3-30B-A3B; only
the bytes of the experts selected by the rows count. Several processes compile the kernels first.
``--device emulation`` runs a tiny case in Triton's interpreter as a smoke test.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from tandem.benchmarks.support.gpu_figures import Figure, figure, limits_of_run, parser, run
from tandem.benchmarks.support.gpu_timing import (
    DEVICE,
    EMULATED,
    UNCACHED_BYTES,
    graph_seconds,
    limits,
)
from tandem.kernels.block_formats import BLOCK_FORMATS, BlockFormat, group_format
from tandem.kernels.gpu import quantized_trial, scaled_linear
from tandem.kernels.gpu.grouped_experts import StackedWeights, TritonExperts
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.packed_codes import PackedCodes, pack, stack_packed
from tandem.kernels.grouped_codes import GroupedCodes
from tandem.kernels.quantized import QuantizedWeight
from tandem.tests.support.random_blocks import random_weight

BF16, SCALED = "bf16", "FP8 scaled"
OTHERS = {
    "FP8": group_format("e4m3", 8, 128, "F32"),
    "AWQ": group_format("int", 4, 128, "F16", "zero"),
    "GPTQ": group_format("int", 4, 128, "F16"),
    "MLX4": group_format("int", 4, 64, "BF16", "minimum"),
    "NF4": group_format("nf4", 4, 64, "F32"),
}
GGUF = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL", "MXFP4", "NVFP4")
# Formats whose codebooks are in a library.
BOOKS = ("IQ3_XXS", "IQ2_XS") if find_spec("gguf") else ()
KINDS: dict[str, BlockFormat] = {name: BLOCK_FORMATS[name] for name in (*GGUF, *BOOKS)} | OTHERS
OF_EXPERTS = (BF16, "Q4_0", "Q4_K", "MXFP4")


@dataclass(frozen=True)
class ProductLoad:
    """Shapes, rows, and how often each case is timed."""

    outputs: int
    inputs: int
    # Total bytes of the copies of a weight.
    uncached: int
    rows: tuple[int, ...]
    wide: tuple[int, ...]
    experts: int
    chosen: int
    expert_shape: tuple[int, int]
    expert_rows: tuple[int, ...]


ON_GPU = ProductLoad(
    *(14336, 4096, UNCACHED_BYTES, (1, 8, 16, 32, 64), (512, 2048)),
    *(128, 8, (768, 2048), (1, 8, 32, 512)),
)
SMALL = ProductLoad(32, 256, 1 << 12, (3,), (), 4, 2, (32, 256), (2,))


def eager_seconds(work: Callable[[], Any], count: int) -> float:
    """Time of a function whose kernels are launched one by one from Python."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


# Triton's interpreter computes with it, and not with bfloat16.
DTYPE = torch.float16 if EMULATED else torch.bfloat16


# ---- the sides -----------------------------------------------------------------------------------


def packed(load: ProductLoad, name: str, outputs: int, inputs: int) -> PackedCodes:
    """A weight in the kernel's layout. Its values do not matter, and random bytes are slow to
    draw."""
    kind = KINDS[name]
    few = min(outputs, 512)
    some = random_weight(kind, few, inputs // kind.values).blocks.repeat(outputs // few, 1)
    return pack(QuantizedWeight(kind, some.to(DEVICE)))


def bytes_of(weight: PackedCodes) -> int:
    minimums = 0 if weight.minimums is None else weight.minimums.nbytes
    return weight.words.nbytes + weight.scales.nbytes + minimums + weight.factors.nbytes


def split(stacked: PackedCodes, count: int) -> list[PackedCodes]:
    """Split stacked weights into single ones."""
    tiles, outputs = len(stacked.words) // count, stacked.outputs // count
    return [
        replace(
            stacked,
            words=stacked.words[tiles * i : tiles * (i + 1)],
            scales=stacked.scales[tiles * i : tiles * (i + 1)],
            minimums=None
            if stacked.minimums is None
            else stacked.minimums[tiles * i : tiles * (i + 1)],
            factors=stacked.factors[outputs * i : outputs * (i + 1)],
        )
        for i in range(count)
    ]


def linears(load: ProductLoad, name: str) -> tuple[list[Callable[[torch.Tensor], Any]], int]:
    """Copies of one weight, and the bytes of one copy."""
    from tandem.kernels.gpu.quantized_linear import multiply

    shape = load.outputs, load.inputs
    if name == BF16:
        plain = torch.randn(shape, device=DEVICE, dtype=DTYPE)
        count = -(-load.uncached // plain.nbytes)
        weights = [plain.clone() for _ in range(count)]
        return [lambda x, w=w: F.linear(x, w) for w in weights], plain.nbytes  # type: ignore[misc]
    if name == SCALED:
        codes = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
        scales = torch.rand(load.outputs, 1, device=DEVICE).expand(-1, load.inputs // 128)
        count = -(-load.uncached // codes.nbytes)
        each = [GroupedCodes(codes.clone(), scales.contiguous(), None, 128) for _ in range(count)]
        return [scaled_linear.ScaledLinear(one, "rows", None) for one in each], codes.nbytes
    one = packed(load, name, *shape)
    count = -(-load.uncached // bytes_of(one))
    copies = split(stack_packed([one] * count, count), count)
    return [lambda x, w=w: multiply(x, w) for w in copies], bytes_of(one)  # type: ignore[misc]


def experts_of(load: ProductLoad, name: str) -> tuple[TritonExperts, int]:
    """A layer's experts, and the bytes of one of them."""
    width, hidden = load.expert_shape
    halves, size = [], 0
    for outputs, inputs in ((2 * width, hidden), (hidden, width)):
        if name == BF16:
            shape = load.experts, outputs, inputs
            run: torch.Tensor | PackedCodes = torch.randn(shape, device=DEVICE, dtype=DTYPE)
            size += 2 * outputs * inputs
        else:
            one = packed(load, name, outputs, inputs)
            size += bytes_of(one)
            run = stack_packed([one] * load.experts, load.experts)
        halves.append(StackedWeights(load.experts, (run,), None))
    return TritonExperts(halves[0], halves[1], GpuOperators().act_and_mul, "silu"), size


# ---- the run -------------------------------------------------------------------------------------


def products(load: ProductLoad, names: list[str]) -> Iterator[Figure]:
    """Products of one weight with so many rows."""
    for name in names:
        if name == SCALED and not scaled_linear.works("rows", DEVICE, True):
            continue
        sides, size = linears(load, name)
        for rows in (*load.rows, *load.wide):
            if rows in load.wide and name not in (BF16, SCALED, "Q4_0", "Q4_K"):
                continue
            x = torch.randn(rows, load.inputs, device=DEVICE, dtype=DTYPE)
            duration = graph_seconds([partial(side, x) for side in sides])
            share = size / duration / limits().copy
            yield figure(f"product {name}, {rows} rows", duration * 1e6, "us", share)


def mixtures(load: ProductLoad) -> Iterator[Figure]:
    """Layers of experts."""
    for name in ("Q4_0",) if EMULATED else OF_EXPERTS:
        experts, size = experts_of(load, name)
        for rows in load.expert_rows:
            x = torch.randn(rows, load.expert_shape[1], device=DEVICE, dtype=DTYPE)
            scores = torch.rand(rows, load.experts, device=DEVICE)
            weights, selected = scores.topk(load.chosen)
            out = torch.zeros_like(x)
            work = lambda e=experts, a=(x, weights, selected, out): e(*a)  # noqa: E731
            duration, eager = graph_seconds([work]), eager_seconds(work, 1 if EMULATED else 50)
            read = len(selected.unique()) * size
            share = read / duration / limits().copy
            yield figure(f"experts {name}, {rows} rows", duration * 1e6, "us", share)
            yield figure(f"experts {name}, {rows} rows, from Python", eager * 1e6, "us")


def _compile(case: tuple[str, int]) -> str:
    """Compile a kernel into Triton's cache, and return its error."""
    name, rows = case
    gpu = torch.device("cuda")
    error = quantized_trial.largest_error(KINDS[name], torch.bfloat16, gpu, rows)
    return "" if error < quantized_trial.limit(torch.bfloat16) else f"{name} {rows}: {error:g} off"


def compile_all() -> None:
    """Compile all timed kernels in several processes: Triton compiles one kernel at a time in
    each."""
    from tandem.kernels.gpu.quantized_linear import ROWS

    cases = [(name, rows) for rows in (*ROWS, max(ROWS) + 1) for name in KINDS]
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        for line in pool.imap_unordered(_compile, cases):
            if line:
                print(f"  {line}", flush=True)
    print(f"{len(cases)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)


def measure(load: ProductLoad) -> Iterator[Figure]:
    """All figures."""
    yield from limits_of_run()
    yield from products(load, ["Q4_0"] if EMULATED else [BF16, *KINDS, SCALED])
    yield from mixtures(load)


def main() -> int:
    options = parser("gpu_products", __doc__).parse_args()
    if torch.cuda.is_available():
        compile_all()
    with torch.inference_mode():
        return run("gpu_products", options, measure(SMALL if EMULATED else ON_GPU))


if __name__ == "__main__":
    sys.exit(main())
