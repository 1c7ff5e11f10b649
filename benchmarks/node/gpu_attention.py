"""Attention alone on a GPU, by cache dtype and by compile options.

    python -m tandem.benchmarks.node.gpu_attention [--out DIR] [--device emulation]

Over one layer of Llama-3-8B: rows of 64 sequences of 8,192 tokens that decode, against a copy of
the same bytes; and a chunk of 8,192 tokens, against a product, as it is, with a window, and as
eight chunks of 1,024. Rows that decode also over the latents of one layer of DeepSeek-V2-Lite and
of DeepSeek-V3. Then the kernels of Llama with other tile sizes, stages and warps: a variant that is
faster by more than a few percent should become the default. ``--device emulation`` runs a tiny case
in Triton's interpreter as a smoke test.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if "emulation" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from tandem.benchmarks.support.gpu_predictions import ATTENTION, CHUNKS, PREDICTIONS
from tandem.benchmarks.support.report import RESULTS, write
from tandem.kernels.attention_metadata import (
    AttentionParams,
    DecodeMetadata,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)
from tandem.kernels.fp8 import FP8
from tandem.kernels.gpu import chunk_attention as chunk_kernels
from tandem.kernels.gpu import latent_trial
from tandem.kernels.gpu import paged_decode as kernels
from tandem.kernels.scaled import INT8, CachedKV, ScaledKV, quantize

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
FORMATS = {"bf16": torch.bfloat16, "fp8": FP8, "int8": INT8}
OPTIONS = [
    {"tile": tile, "num_stages": stages, "num_warps": warps}
    for tile, stages, warps in product((32, 64, 128), (2, 3), (4, 8))
]
SWEPT = ("bf16", "fp8")
CHUNK_OPTIONS = [
    {"BLOCK_M": rows, "BLOCK_N": tokens, "num_warps": warps, "num_stages": stages}
    for rows, tokens, warps in (
        (64, 64, 4),
        (64, 128, 4),
        (64, 128, 8),
        (128, 32, 8),
        (128, 64, 8),
        (128, 128, 8),
    )
    for stages in (2, 3)
]
WINDOW = 1024
# Heads of a layer with latents, and its dimensions: of a query without position, of its rotated
# part, of a latent, and of a value.
LatentShape = tuple[int, int, int, int, int]
LATENTS: dict[str, LatentShape] = {
    "DeepSeek-V2-Lite": (16, 128, 64, 512, 128),
    "DeepSeek-V3": (128, 128, 64, 512, 128),
}


@dataclass(frozen=True)
class AttentionLoad:
    """Sequences, their tokens, how often each case is timed, and with which options; the rows of a
    product."""

    device: str
    sequences: int
    tokens: int
    rounds: int
    options: list[dict[str, int]]
    latents: dict[str, LatentShape]
    chunk_options: list[dict[str, int]]
    product_rows: int


ON_GPU = AttentionLoad("cuda", 64, 8192, 15, OPTIONS, LATENTS, CHUNK_OPTIONS, 8192)
EMULATED = AttentionLoad(
    "cpu", 2, 40, 1, OPTIONS[:2], {"tiny": (2, 16, 16, 32, 16)}, CHUNK_OPTIONS[:1], 64
)


def cache(
    load: AttentionLoad, dtype: torch.dtype, heads: int = KV_HEADS, dim: int = DIM
) -> CachedKV:
    """Keys, values or latents of all sequences."""
    dtype = torch.float32 if load.device == "cpu" and dtype == torch.bfloat16 else dtype
    slots = load.sequences * -(-load.tokens // BLOCK) * BLOCK
    values = torch.randn(heads, slots, dim, device=load.device)
    return ScaledKV(*quantize(values)) if dtype == INT8 else values.to(dtype)


def decoding(load: AttentionLoad) -> DecodeMetadata:
    """The rows of one step, whose blocks lie anywhere."""
    each = -(-load.tokens // BLOCK)
    order = torch.randperm(load.sequences * each).tolist()
    sequences = [
        SequenceMetadata(
            slice(row, row + 1), load.tokens - 1, order[row * each : (row + 1) * each], BLOCK
        )
        for row in range(load.sequences)
    ]
    decodes = decode_metadata(sequences, torch.device(load.device))
    assert decodes is not None
    return decodes


def random(load: AttentionLoad, *shape: int) -> torch.Tensor:
    """Random activations or weights."""
    x = torch.randn(shape, device=load.device)
    return x if load.device == "cpu" else x.bfloat16()


def attention(load: AttentionLoad, keys: CachedKV, values: CachedKV) -> Callable[[], None]:
    """Return a function that runs attention for the rows of one step."""
    decodes, q = decoding(load), random(load, load.sequences, HEADS, DIM)
    out, params = torch.empty_like(q), AttentionParams(DIM**-0.5)
    return lambda: kernels.paged_decode(q, keys, values, decodes, params, out)


def chunk_attention(
    load: AttentionLoad, keys: CachedKV, values: CachedKV, count: int, window: int | None
) -> Callable[[], None]:
    """Return a function that runs attention for so many chunks, which have all of a prompt's tokens
    together."""
    rows = load.tokens // count
    each = -(-rows // BLOCK)
    order = torch.randperm(count * each).tolist()
    sequences = [
        SequenceMetadata(
            slice(first * rows, (first + 1) * rows),
            0,
            order[first * each : (first + 1) * each],
            BLOCK,
        )
        for first in range(count)
    ]
    chunks = chunk_metadata(sequences, torch.device(load.device))
    assert chunks is not None
    q = torch.randn(count * rows, HEADS, DIM, device=load.device)
    q = q if load.device == "cpu" else q.bfloat16()
    out, params = torch.empty_like(q), AttentionParams(DIM**-0.5, window)
    return lambda: chunk_kernels.chunk_attention(q, keys, values, chunks, params, out)


def operations(load: AttentionLoad, count: int, window: int | None) -> float:
    """Those of the products with K and V that rows attend to."""
    rows = load.tokens // count
    seen = sum(min(row + 1, window or rows) for row in range(rows))
    return 4.0 * HEADS * DIM * count * seen


def multiplied(load: AttentionLoad) -> float:
    """Operations a second of a square product."""
    dtype = torch.float32 if load.device == "cpu" else torch.bfloat16
    size = load.product_rows
    x = torch.randn(size, size, device=load.device).to(dtype)
    return 2.0 * size**3 / seconds(load, lambda: x @ x)


def latent_attention(
    load: AttentionLoad, latents: CachedKV, shape: LatentShape
) -> Callable[[], None]:
    """Like ``attention``, with the products before and after it."""
    heads, nope, rope, width, value = shape
    decodes, q = decoding(load), random(load, load.sequences, heads, nope + rope)
    up = random(load, heads, nope + value, width) * width**-0.5
    k_up, v_up = up.split([nope, value], dim=1)
    out, scale = q.new_empty(load.sequences, heads, value), (nope + rope) ** -0.5
    return lambda: latent_trial.attend_latents(q, latents, k_up, v_up, decodes, None, scale, out)


def seconds(load: AttentionLoad, work: Callable[[], Any]) -> float:
    """The median time on the device."""
    if load.device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    for _ in range(3):
        work()
    samples = []
    for _ in range(load.rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) / 1e3)
    return statistics.median(samples)


def size(cached: CachedKV) -> int:
    """Bytes."""
    if isinstance(cached, torch.Tensor):
        return cached.nbytes
    scales = cached.scales.nbytes if isinstance(cached, ScaledKV) else 0
    return cached.values.nbytes + scales


def copied(load: AttentionLoad) -> float:
    """Bandwidth of a copy in bytes a second, reads and writes counted."""
    source = torch.empty(1 << (30 if load.device == "cuda" else 20), dtype=torch.uint8)
    source = source.to(load.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(load, lambda: target.copy_(source))


def sweep(load: AttentionLoad, work: Callable[[], None]) -> None:
    """Print the time with each combination of options that compiles."""
    constants, options = kernels.constants, dict(kernels.ATTEND_OPTIONS)
    try:
        for each in load.options:
            kernels.constants = partial(_with_tile, constants, each["tile"])
            kernels.ATTEND_OPTIONS.update({k: v for k, v in each.items() if k != "tile"})
            try:
                result = f"{seconds(load, work) * 1e6:.0f} us"
            except Exception as error:  # for example, too much shared memory
                result = type(error).__name__
            print(f"  {' '.join(f'{k} {v}' for k, v in each.items())}: {result}", flush=True)
    finally:
        kernels.constants = constants
        kernels.ATTEND_OPTIONS.update(options)


def sweep_chunks(load: AttentionLoad, work: Callable[[], None]) -> None:
    """The same for chunks."""
    constants = chunk_kernels.constants
    try:
        for each in load.chunk_options:
            chunk_kernels.constants = lambda *arguments, each=each: constants(*arguments) | each
            try:
                result = f"{seconds(load, work) * 1e6:.0f} us"
            except Exception as error:  # for example, too much shared memory
                result = type(error).__name__
            print(f"  {' '.join(f'{k} {v}' for k, v in each.items())}: {result}", flush=True)
    finally:
        chunk_kernels.constants = constants


def _with_tile(constants: Callable[..., Any], tile: int, *arguments: Any) -> Any:
    fixed = constants(*arguments)
    return fixed._replace(attend=fixed.attend | {"BLOCK_N": tile})


def measure(load: AttentionLoad) -> Iterator[dict[str, Any]]:
    """Yield rows for ``report.write`` as they are measured."""
    yield from measure_chunks(load)
    yield from measure_decode(load)


def measure_chunks(load: AttentionLoad) -> Iterator[dict[str, Any]]:
    """A prompt, in all dtypes of a cache; in bfloat16 also with a window and in several chunks."""
    limit, alone = multiplied(load), replace(load, sequences=1)
    swept: list[Callable[[], None]] = []
    for name, dtype in FORMATS.items():
        keys, values = cache(alone, dtype), cache(alone, dtype)
        cases: dict[str, tuple[int, int | None]] = {name: (1, None)}
        if not swept:
            cases |= {f"{name}, window {WINDOW}": (1, WINDOW), f"{name}, 8 chunks": (8, None)}
        for case, (count, window) in cases.items():
            work = chunk_attention(load, keys, values, count, window)
            swept.append(work)
            rate = operations(load, count, window) / seconds(load, work)
            metric = f"{CHUNKS}, {case}"
            result = f"; predicted {PREDICTIONS[metric]}" if metric in PREDICTIONS else ""
            yield {
                "metric": metric,
                "value": rate / limit,
                "unit": "of a product's rate",
                "against": f"{rate / 1e12:.4g} of {limit / 1e12:.4g} TFLOP/s{result}",
            }
    print("chunks in bf16 with other options:", flush=True)
    sweep_chunks(load, swept[0])


def measure_decode(load: AttentionLoad) -> Iterator[dict[str, Any]]:
    """Rows that decode, in all dtypes of a cache."""
    limit, plain = copied(load), 0.0
    sweeps = {}
    for name, dtype in FORMATS.items():
        keys, values = cache(load, dtype), cache(load, dtype)
        work = attention(load, keys, values)
        duration = seconds(load, work)
        plain = plain or duration
        rate = (size(keys) + size(values)) / duration
        metric = f"{ATTENTION}, {name}"
        result = f"predicted {PREDICTIONS[metric]}" if metric in PREDICTIONS else ""
        against = f"a copy's {limit / 1e9:.4g} GB/s; {plain / duration:.2f} x bf16; {result}"
        yield {
            "metric": metric,
            "value": rate / limit,
            "unit": "of a copy's speed",
            "against": against,
        }
        sweeps[name] = work
    for model, shape in load.latents.items():
        for name, dtype in FORMATS.items():
            latents = cache(load, dtype, 1, shape[2] + shape[3])
            duration = seconds(load, latent_attention(load, latents, shape))
            yield {
                "metric": f"latent attention of {model}, {name}",
                "value": size(latents) / duration / limit,
                "unit": "of a copy's speed",
                "against": f"a copy's {limit / 1e9:.4g} GB/s; {duration * 1e6:.0f} us",
            }
    for name in SWEPT:
        print(f"{name} with other options:", flush=True)
        sweep(load, sweeps[name])


def main() -> int:
    parser = argparse.ArgumentParser("gpu_attention", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cuda", "emulation"), default="cuda")
    options = parser.parse_args()
    emulated = options.device == "emulation"
    if not emulated and not torch.cuda.is_available():
        print("gpu_attention: there is no CUDA device here, so there is nothing to measure")
        return 1
    rows = []
    for row in measure(EMULATED if emulated else ON_GPU):
        print(f"{row['metric']}: {row['value']:.3g} {row['unit']}  {row['against']}", flush=True)
        rows.append(row)
        if not emulated:
            write("gpu_attention", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
