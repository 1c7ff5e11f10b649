"""One side of ``quantised_experts.py``, run with its checkout as ``tandem``.

``python experts_side.py SIDE THREADS`` reads numbers of rows, and replies to each with operations a
second, in billions. Sides are ``Q4_0``, ``bf16`` for the loop over plain weights, and ``earlier``
for the compiled operators of a commit that has no quantised experts, on weights in bf16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# A layer of Qwen3-30B-A3B.
HIDDEN, INNER, COUNT, CHOSEN = 2048, 768, 128, 8
# How many times a turn chooses experts, and how often it calls with each choice.
CHOICES, CALLS = 16, 3

# From rows, weights and chosen experts to the results.
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def quantised() -> tuple[Layer, torch.dtype]:
    """All experts have the same values, in memory of their own: packing copies them."""
    from tandem.kernels.block_formats import Q4_0
    from tandem.kernels.cpu import jit
    from tandem.kernels.cpu.operators import CompiledOperators
    from tandem.tests.support.random_blocks import random_weight

    jit.prepare()
    gate_up = random_weight(Q4_0, 2 * INNER, HIDDEN // Q4_0.values)
    down = random_weight(Q4_0, HIDDEN, INNER // Q4_0.values)
    experts = CompiledOperators().prepare_experts(
        [(gate_up,)] * COUNT, [(down,)] * COUNT, "silu", torch.float32
    )
    return lambda x, weights, ids: experts(x, weights, ids, None), torch.float32


def plain() -> tuple[Layer, torch.dtype]:
    """The operator that torch's kernels use."""
    from tandem.kernels.operators import Operators

    gate_up, down = (each[0] for each in bf16_weights(1))
    experts = Operators().prepare_experts(
        [(gate_up,)] * COUNT, [(down,)] * COUNT, "silu", torch.bfloat16
    )
    return lambda x, weights, ids: experts(x, weights, ids, None), torch.bfloat16


def earlier() -> tuple[Layer, torch.dtype]:
    """With the operators as they were declared then."""
    from tandem.kernels.cpu.operators import CompiledOperators

    operators: Any = CompiledOperators()
    dtype = operators.activation_dtype(torch.bfloat16, torch.device("cpu"))
    experts = operators.prepare_experts(*bf16_weights(COUNT), "silu")
    return lambda x, weights, ids: experts(x, weights, ids, torch.zeros_like(x)), dtype


def bf16_weights(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same values of all experts, each in memory of its own."""
    gate_up = torch.randn(2 * INNER, HIDDEN).bfloat16() * 0.02
    down = torch.randn(HIDDEN, INNER).bfloat16() * 0.02
    return [gate_up.clone() for _ in range(count)], [down.clone() for _ in range(count)]


def seconds(layer: Layer, dtype: torch.dtype, rows: int) -> float:
    """The best time of a call."""
    x = torch.randn(rows, HIDDEN).to(dtype)
    weights = torch.full((rows, CHOSEN), 1 / CHOSEN)
    choices = [torch.rand(rows, COUNT).topk(CHOSEN).indices for _ in range(CHOICES)]
    times = []
    for ids in choices * CALLS:
        begin = time.perf_counter()
        layer(x, weights, ids)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    side, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    layer, dtype = {"Q4_0": quantised, "bf16": plain, "earlier": earlier}[side]()
    with torch.inference_mode():
        for line in sys.stdin:
            rows = int(line)
            work = 2 * rows * CHOSEN * 3 * HIDDEN * INNER / 1e9
            print(work / seconds(layer, dtype, rows), flush=True)


if __name__ == "__main__":
    main()
