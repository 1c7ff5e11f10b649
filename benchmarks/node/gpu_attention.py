"""Attention alone on a GPU, by cache dtype and, with ``--sweep``, by compile options.

    python -m tandem.benchmarks.node.gpu_attention [--sweep] [--out DIR] [--device emulation]

Over one layer of Llama-3-8B: rows of 64 sequences that decode, against a copy of the same bytes,
and one long row beside many short ones, against as many tokens in equal rows; a chunk of 8,192
tokens, against a product, as it is, with a window, and as eight chunks of 1,024. Rows that decode
also over the latents of one layer of DeepSeek-V2-Lite and of DeepSeek-V3. The sweep tries the
kernels of Llama with other tile sizes, stages and warps: a variant that is faster by more than a
few percent should become the default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from tandem.benchmarks.support.gpu_figures import Figure, figure, parser, run
from tandem.benchmarks.support.gpu_predictions import CHUNKS, DECODE, FP8_GAIN
from tandem.benchmarks.support.gpu_timing import (
    DEVICE,
    DTYPE,
    EMULATED,
    graph_seconds,
    limits,
    release,
    seconds,
)
from tandem.kernels.attention_metadata import (
    AttentionParams,
    DecodeMetadata,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)
from tandem.kernels.fp8 import FP8
from tandem.kernels.gpu import chunk_attention as chunk_kernels
from tandem.kernels.gpu import paged_decode as kernels
from tandem.kernels.gpu.latent_attention import attend_latents
from tandem.kernels.scaled import INT8, CachedKV, ScaledKV, quantize

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
FORMATS = {"bf16": torch.bfloat16, "fp8": FP8, "int8": INT8}
OPTIONS = [
    {"BLOCK_N": tokens, "num_stages": stages, "num_warps": warps}
    for tokens, stages, warps in product((32, 64, 128), (2, 3, 4), (2, 4))
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
    """Sequences that decode and their tokens; tokens of a prompt and of the latents' sequences; a
    long row beside short ones; and the options to sweep."""

    sequences: int
    tokens: tuple[int, ...]
    prompt: int
    mixed: tuple[int, ...]
    latents: dict[str, LatentShape]
    options: list[dict[str, int]]
    chunk_options: list[dict[str, int]]


ON_GPU = AttentionLoad(
    64, (4096, 32768), 8192, (32768, *[64] * 255), LATENTS, OPTIONS, CHUNK_OPTIONS
)
SMALL = AttentionLoad(
    2, (20, 40), 40, (40, 5, 5), {"tiny": (2, 16, 16, 32, 16)}, OPTIONS[:2], CHUNK_OPTIONS[:1]
)


def cache(tokens: int, dtype: torch.dtype, heads: int = KV_HEADS, dim: int = DIM) -> CachedKV:
    """Keys, values or latents of so many tokens, in whole blocks. In emulation, float32 for
    bfloat16."""
    dtype = DTYPE if dtype == torch.bfloat16 else dtype
    values = torch.randn(heads, tokens, dim, device=DEVICE, dtype=DTYPE)
    return ScaledKV(*quantize(values.float())) if dtype == INT8 else values.to(dtype)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def decoding(lengths: Sequence[int]) -> DecodeMetadata:
    """The rows of one step, whose blocks lie anywhere."""
    order = torch.randperm(sum(map(blocks_of, lengths))).tolist()
    sequences = []
    for row, length in enumerate(lengths):
        table, order = order[: blocks_of(length)], order[blocks_of(length) :]
        sequences.append(SequenceMetadata(slice(row, row + 1), length - 1, table, BLOCK))
    decodes = decode_metadata(sequences, DEVICE)
    assert decodes is not None
    return decodes


def random(*shape: int) -> torch.Tensor:
    """Random activations or weights."""
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def attention(lengths: Sequence[int], kv: Sequence[CachedKV]) -> Callable[[], None]:
    """Return a function that runs attention for the rows of one step."""
    decodes, q = decoding(lengths), random(len(lengths), HEADS, DIM)
    out, params = torch.empty_like(q), AttentionParams(DIM**-0.5)
    keys, values = kv
    return lambda: kernels.paged_decode(q, keys, values, decodes, params, out)


def chunk_attention(
    tokens: int, kv: Sequence[CachedKV], count: int, window: int | None
) -> Callable[[], None]:
    """Return a function that runs attention for so many chunks, which have all of a prompt's tokens
    together."""
    rows = tokens // count
    each = blocks_of(rows)
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
    chunks = chunk_metadata(sequences, DEVICE)
    assert chunks is not None
    q = random(count * rows, HEADS, DIM)
    out, params = torch.empty_like(q), AttentionParams(DIM**-0.5, window)
    keys, values = kv
    return lambda: chunk_kernels.chunk_attention(q, keys, values, chunks, params, out)


def operations(tokens: int, count: int, window: int | None) -> float:
    """Operations of the products with the K and V that rows attend to."""
    rows = tokens // count
    pairs = sum(min(row + 1, window or rows) for row in range(rows))
    return 4.0 * HEADS * DIM * count * pairs


def latent_attention(
    lengths: Sequence[int], latents: CachedKV, shape: LatentShape
) -> Callable[[], None]:
    """Like ``attention``, with the products before and after it."""
    heads, nope, rope, width, value = shape
    decodes, q = decoding(lengths), random(len(lengths), heads, nope + rope)
    up = random(heads, nope + value, width) * width**-0.5
    k_up, v_up = up.split([nope, value], dim=1)
    out, scale = q.new_empty(len(lengths), heads, value), (nope + rope) ** -0.5
    return lambda: attend_latents(q, latents, k_up, v_up, decodes, None, scale, out)


def size(cached: CachedKV) -> int:
    """Bytes."""
    if isinstance(cached, torch.Tensor):
        return cached.nbytes
    scales = cached.scales.nbytes if isinstance(cached, ScaledKV) else 0
    return cached.values.nbytes + scales


# ---- the figures -------------------------------------------------------------------------------


def decodes_of(load: AttentionLoad) -> Iterator[Figure]:
    """Rows that decode, in all dtypes of a cache; the value is the share of a copy's speed."""
    for tokens in load.tokens:
        lengths, plain = [tokens] * load.sequences, 0.0
        case = f"{load.sequences} x {tokens}"
        for name, dtype in FORMATS.items():
            kv = [cache(sum(map(blocks_of, lengths)) * BLOCK, dtype) for _ in range(2)]
            duration = graph_seconds([attention(lengths, kv)])
            share = sum(map(size, kv)) / duration / limits().copy
            yield figure(DECODE.format(case, name), share, "", share)
            plain = plain or duration
            if name == "fp8":
                yield figure(FP8_GAIN.format(case), plain / duration, "x")
            del kv
            release()


def mixed_rows(load: AttentionLoad) -> Iterator[Figure]:
    """One long row beside short ones, over as many tokens in equal rows."""
    blocks, (long, *short) = sum(map(blocks_of, load.mixed)), load.mixed
    kv = [cache(blocks * BLOCK, torch.bfloat16) for _ in range(2)]
    equal = [blocks // len(short) * BLOCK] * len(short)
    mixed, even = (graph_seconds([attention(each, kv)]) for each in (load.mixed, equal))
    case = f"1 x {long} + {len(short)} x {short[0]}"
    yield figure(DECODE.format(case, "bf16 over equal rows"), mixed / even, "x")


def chunks_of(load: AttentionLoad) -> Iterator[Figure]:
    """A prompt, in all dtypes of a cache; in bfloat16 also with a window and in several chunks. The
    value is the share of a product's rate."""
    for name, dtype in FORMATS.items():
        kv = [cache(blocks_of(load.prompt) * BLOCK, dtype) for _ in range(2)]
        cases: dict[str, tuple[int, int | None]] = {name: (1, None)}
        if name == "bf16":
            cases |= {f"{name}, window {WINDOW}": (1, WINDOW), f"{name}, 8 chunks": (8, None)}
        for case, (count, window) in cases.items():
            duration = graph_seconds([chunk_attention(load.prompt, kv, count, window)])
            share = operations(load.prompt, count, window) / duration / limits().product
            yield figure(CHUNKS.format(case), share, "", share)


def latents_of(load: AttentionLoad) -> Iterator[Figure]:
    """Rows that decode over latents."""
    lengths = [load.prompt] * load.sequences
    for model, shape in load.latents.items():
        for name, dtype in FORMATS.items():
            tokens = sum(map(blocks_of, lengths)) * BLOCK
            latents = cache(tokens, dtype, 1, shape[2] + shape[3])
            duration = graph_seconds([latent_attention(lengths, latents, shape)])
            share = size(latents) / duration / limits().copy
            yield figure(f"latent attention of {model}, {name}", share, "", share)


# ---- the sweep ---------------------------------------------------------------------------------


def sweep(load: AttentionLoad) -> None:
    """Print the time with each combination of options that compiles."""
    lengths = [load.prompt] * load.sequences
    for name in SWEPT:
        kv = [cache(sum(map(blocks_of, lengths)) * BLOCK, FORMATS[name]) for _ in range(2)]
        print(f"decode {name} with other options:", flush=True)
        _sweep_decodes(load.options, attention(lengths, kv))
    kv = [cache(blocks_of(load.prompt) * BLOCK, torch.bfloat16) for _ in range(2)]
    print("chunks in bf16 with other options:", flush=True)
    _sweep_chunks(load.chunk_options, chunk_attention(load.prompt, kv, 1, None))


def _sweep_decodes(options: list[dict[str, int]], work: Callable[[], None]) -> None:
    constants = kernels.constants
    try:
        for each in options:
            kernels.constants = partial(_with_options, constants, each)
            _print_time(each, work)
    finally:
        kernels.constants = constants


def _sweep_chunks(options: list[dict[str, int]], work: Callable[[], None]) -> None:
    constants = chunk_kernels.constants
    try:
        for each in options:
            chunk_kernels.constants = lambda *arguments, each=each: constants(*arguments) | each
            _print_time(each, work)
    finally:
        chunk_kernels.constants = constants


def _print_time(options: dict[str, int], work: Callable[[], None]) -> None:
    try:
        result = f"{seconds(work) * 1e6:.0f} us"
    except Exception as error:  # for example, too much shared memory
        result = type(error).__name__
    print(f"  {' '.join(f'{k} {v}' for k, v in options.items())}: {result}", flush=True)


def _with_options(constants: Callable[..., Any], options: dict[str, int], *arguments: Any) -> Any:
    fixed = constants(*arguments)
    return fixed._replace(attend=fixed.attend | options)


def measure(load: AttentionLoad) -> Iterator[Figure]:
    """All figures, the most valuable first."""
    for part in (decodes_of, chunks_of, mixed_rows, latents_of):
        yield from part(load)


def main() -> int:
    options = parser("gpu_attention", __doc__)
    options.add_argument("--sweep", action="store_true", help="try other compile options")
    chosen = options.parse_args()
    load = SMALL if EMULATED else ON_GPU
    if chosen.sweep:
        sweep(load)
        return 0
    return run("gpu_attention", chosen, measure(load))


if __name__ == "__main__":
    sys.exit(main())
