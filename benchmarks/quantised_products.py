"""Quantised matrix products on a CPU with AVX2, in the shape of an 8B model's gate.

    python -m tandem.benchmarks.quantised_products [FORMAT ...]

Each format and number of rows is compared with torch's product with bf16 weights, packed as in
models. One row is bound by memory bandwidth, so it is also compared with the read rate. There are
enough copies of a weight to exceed the CPU's caches. Sides alternate, and a figure is the best of
its rounds, because other processes only slow a product down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.block_formats import BLOCK_FORMATS, group_format
from tandem.kernels.cpu import jit
from tandem.kernels.quantized import QuantizedWeight
from tandem.kernels.reference.linear import prepare_linear
from tandem.kernels.signatures import Linear
from tandem.tests.support.random_blocks import random_weight

INPUTS, OUTPUTS = 4096, 14336
ROWS = (1, 8, 32, 512)
# Duration of one turn of a side.
SECONDS = 0.1
UNCACHED = 1 << 27
BF16 = "bf16"

Product = Callable[[torch.Tensor], torch.Tensor]
# Formats of safetensors methods, and of GGUF.
KINDS = {
    "FP8": group_format("e4m3", 8, 128, "F32"),
    "AWQ": group_format("int", 4, 128, "F16", "zero"),
    "W4A16": group_format("int", 4, 128, "BF16"),
    "W8A16": group_format("int", 8, 128, "BF16"),
    "MLX4": group_format("int", 4, 64, "BF16", "minimum"),
    "NF4": group_format("nf4", 4, 64, "F32"),
    "E2M1": group_format("e2m1", 4, 16, "F32"),
} | BLOCK_FORMATS


def copies_of(name: str) -> list[Linear]:
    """Copies of one weight."""
    from tandem.kernels.cpu.byte_products import PanelLinear

    if name == BF16:
        plain = torch.randn(OUTPUTS, INPUTS).bfloat16() * 0.02
        return [prepare_linear(plain.clone(), None) for _ in range(-(-UNCACHED // plain.nbytes))]
    kind = KINDS[name]
    # The values do not matter; random bytes would be slow to draw.
    some = random_weight(kind, OUTPUTS // 32, INPUTS // kind.values).blocks.repeat(32, 1)
    weight = QuantizedWeight(kind, some)
    return [PanelLinear(weight, None) for _ in range(-(-UNCACHED // some.nbytes))]


def seconds(products: Sequence[Product], x: torch.Tensor) -> float:
    """Best time of a product over repeated runs."""
    begin, best, count = time.perf_counter(), float("inf"), 0
    while count < 3 or time.perf_counter() < begin + SECONDS:
        start = time.perf_counter()
        products[count % len(products)](x)
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def read_rate() -> float:
    """Memory read rate of torch in bytes a second."""
    buffer = torch.ones(UNCACHED // 4)

    def once() -> float:
        start = time.perf_counter()
        buffer.sum()
        return buffer.nbytes / (time.perf_counter() - start)

    return max(once() for _ in range(5))


def measure(name: str, rounds: int, plain: list[Linear], note: Callable[[str], None]) -> list[Any]:
    """Rows of the report for a format."""
    products, results = copies_of(name), []
    nbytes = KINDS[name].bytes_of(INPUTS * OUTPUTS)
    for rows in ROWS:
        x = torch.randn(rows, INPUTS)
        halved = x.bfloat16()
        pairs = [(seconds(products, x), seconds(plain, halved)) for _ in range(rounds)]
        ours, theirs = map(min, zip(*pairs, strict=True))
        work = 2 * rows * INPUTS * OUTPUTS / 1e9
        about = f"{name}, {rows} row{'s' if rows > 1 else ''} of {INPUTS} by {OUTPUTS}"
        results.append(
            {
                "metric": f"product with {about}",
                "value": work / ours,
                "unit": "GOP/s",
                "goal": ">=1",
                "against": f"torch's bf16 product ({work / theirs:.0f} GOP/s)",
                "ratio": theirs / ours,
            }
        )
        if rows == 1:
            limit = read_rate()
            results.append(
                {
                    "metric": f"bytes read by a product with {about}",
                    "value": nbytes / ours / 1e9,
                    "unit": "GB/s",
                    "against": f"a sum of as much memory ({limit / 1e9:.1f} GB/s)",
                    "ratio": nbytes / ours / limit,
                }
            )
        note(f"{about}: {work / ours:.0f} GOP/s, bf16 {work / theirs:.0f}")
    return results


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("formats", nargs="*", help="all if left out")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    jit.prepare()
    if not jit.multiplies_bytes():
        parser.exit(message="this CPU has no AVX2: nothing to measure\n")
    names = options.formats or [*KINDS]

    def note(text: str) -> None:
        print(text, flush=True)

    plain = copies_of(BF16)
    rows = [row for name in names for row in measure(name, options.rounds, plain, note)]
    publish("quantised_products", rows, dry=options.dry)


if __name__ == "__main__":
    main()
