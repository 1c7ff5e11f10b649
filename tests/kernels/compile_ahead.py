"""Compiles the Triton kernels to machine code for GPUs of several generations, without one:

    python -m tandem.tests.kernels.compile_ahead [GENERATION ...]

Their wrappers are called as in a step, so Triton decides itself what it compiles. A kernel that is
recorded (``compiled_kernels.py``) is compiled only in the full extent, which compares both.
``--record`` compiles all and records it. A line for each kernel: the generation, types and shape,
and what a program takes. Fails where one spills registers, takes more registers or shared memory
than its bound, does not copy asynchronously, has too few bytes on their way, or where the
instructions of its loop take too long to issue for the bytes that the loop reads, or for the
products that it takes; and where the record is not that of the kernels.

That count is exact, and no measurement: a kernel cannot be faster, but it may well be slower.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.runtime.jit import JITFunction

from tandem.kernels.activations import Activation
from tandem.kernels.attention_metadata import (
    AttentionParams,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)
from tandem.kernels.block_formats import (
    BLOCK_FORMATS,
    IQ1_M,
    IQ2_S,
    IQ3_S,
    IQ4_NL,
    MXFP4,
    NVFP4,
    Q4_0,
    Q4_K,
    Q8_0,
    BlockFormat,
    group_format,
)
from tandem.kernels.fp8 import FP8
from tandem.kernels.gpu import (
    activation,
    chunk_attention,
    frame_copy,
    grouped_product,
    latent_chunks,
    latent_decode,
    latent_store,
    norm,
    paged_decode,
    quantized_linear,
    rope_store,
    router,
    row_plan,
    sampling,
    sampling_floors,
    sampling_table,
    skinny_linear,
)
from tandem.kernels.gpu import routing as gpu_routing
from tandem.kernels.gpu.packed_codes import (
    PackedCodes,
    pack,
    stack_packed,
    takes,
)
from tandem.kernels.gpu.row_blocks import row_blocks
from tandem.kernels.gpu.step_inputs import stage_inputs
from tandem.kernels.gpu.tiles import CHUNK, TILE
from tandem.kernels.quantized import QuantizedWeight
from tandem.kernels.scaled import INT8, CachedKV, ScaledKV
from tandem.kernels.signatures import FrameCells, Routing
from tandem.tests.kernels.compiled_kernels import (
    MachineCode,
    Record,
    digest,
    ignore_lines,
    read_record,
)
from tandem.tests.kernels.launches import compiled_for
from tandem.tests.support.extent import FULL

GENERATIONS = (80, 89, 90, 100)
# Converts fp8, and has no more shared memory than every generation has; neither has sm_120.
CONVERTING = 89
META = torch.device("meta")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Every generation's programs may have at least this much, also on consumers' GPUs; those for which
# chunks have wide tiles, the second. A processor of theirs has the third, of which a program takes
# the fourth itself.
SHARED_BYTES = 99 << 10
WIDE_SHARED_BYTES = 227 << 10
PROCESSOR_SHARED_BYTES = 228 << 10
RESERVED_SHARED_BYTES = 1 << 10
# A processor has so many registers: so many programs of 128 threads fit on it, by kernel.
# Those of products are up to four times as wide.
REGISTERS = 65_536
PROGRAMS = {
    "_attend": paged_decode._WARPS // 4,
    "_attend_chunks": 2,
    "_list_splits": 4,
    "_multiply": 2,
    "_multiply_skinny": 4,
    "_decode": 4,
    "_add": 8,
    "_multiply_plain": 2,
    "_add_weighted": 7,
    "_copy_frame": 4,
    "_stage": 8,
    "_plan": 8,
    "_rms_norm": 8,
    "_act_and_mul": 8,
    "_rope_store": 6,
    "_choose": 5,
    "_route": 4,
    "_attend_latents": 2,
    "_attend_latent_chunks": 2,
    "_store_latents": 8,
    "_set": 8,
    "_measure": 8,
    "_narrow": 5,
    "_gather": 6,
    "_draw": 6,
}
# Those whose loops take the tensor cores longer than memory.
CHUNKS = ("_attend_chunks", "_attend_latent_chunks")
# Those that read and write the layer's activations 16 bytes a thread.
VECTORED = ("_rms_norm", "_act_and_mul", "_rope_store")
# Those whose programs read in whole vectors.
WIDE = {"_measure", "_gather", "_multiply_skinny"}
# A few words that ptxas puts there for products, whose tiles are as wide as registers allow, and
# for these with the oldest Triton.
OLDEST_SPILLS = ("_attend", "_attend_latents", "_measure", "_draw")
SMALL_STACK = 16
# Queries of latents take most registers while latents of a byte are widened.
LATENT_STACK = 96
# Latents of a byte for chunks do on Blackwell, where sums are moved to registers and back.
LATENT_CHUNKS_STACK = 256
# An H100, whose instructions are counted: bytes that its memory brings each processor in a clock,
# operations of its tensor cores in 16 bits, and instructions that a processor issues in one.
COUNTED = 90
BYTES_A_CLOCK = 3.35e12 / 132 / 1.755e9
OPERATIONS_A_CLOCK = 989e12 / 132 / 1.755e9
# Bytes that are on their way to each processor while a read takes 1,250 clocks, 0.7 microseconds.
BYTES_ON_THEIR_WAY = 18 << 10
ISSUED_A_CLOCK = 4
# The most clocks of issuing instructions for each clock of memory. Real programs issue at some 70 %
# of the limit, so that a kernel up to here is as fast as the memory.
MAX_SLOTS = 0.6
OLDEST = triton.__version__.startswith("3.6.")
# Those for which this version compiles in tests.
COMPILED = (COUNTED,) if OLDEST and not FULL else GENERATIONS
# Those that are not, by words of their names, of which the first entry counts: what they take
# today, so that none gets slower. Tensor cores take 8 rows in an instruction. Codes that stand for
# any 16 numbers are looked up, those of IQ4 in both of their bytes: with 8 rows that takes less
# time than memory does, with more hardly longer. Codebooks take as many instructions as Q8_0 does,
# for a fifth to two fifths of its bytes. Latents are read once for keys and values. Exponentials of
# chunks take as long as products over 64 values. Rows either take the best token or are summed; a
# logit is compared with eight pivots; and few blocks have logits that are listed. gpt-oss's
# activation is rounded five times.
SLOW = (
    ("attend_chunks Llama-3-8B int8", 1.4),
    ("attend_chunks Llama-3-8B", 0.95),
    ("attend_chunks Gemma-2-9B", 1.3),
    ("attend_chunks", 1.55),
    ("attend_latent_chunks int8", 1.2),
    ("attend_latent_chunks", 1.01),
    ("attend_latents int8", 0.67),
    ("attend_latents float32", 0.68),
    ("multiply IQ1_S", 1.9),
    ("multiply IQ1_M", 1.8),
    ("multiply IQ2_XXS", 1.55),
    ("multiply IQ2_XS", 1.45),
    ("multiply IQ2_S", 1.45),
    ("multiply IQ3_XXS", 1.25),
    ("multiply IQ3_S 64", 1.65),
    ("multiply IQ3_S", 1.35),
    ("multiply IQ4_NL 8", 0.83),
    ("multiply IQ4_NL", 1.12),
    ("multiply Q8_0", 0.6),
    ("multiply MXFP4 64", 0.86),
    ("multiply MXFP4 32", 0.71),
    ("multiply MXFP4 16", 0.67),
    ("multiply 64", 0.81),
    ("multiply 32", 0.67),
    ("multiply", 0.63),
    ("copy_frame odd", 0.7),
    ("measure", 1.0),
    ("narrow", 0.96),
    ("gather", 1.5),
    ("act_and_mul clamped_swiglu", 0.65),
)
# Triton 3.6 moves more registers.
SHUFFLED = 1.5 if OLDEST else 1.0


@dataclass(frozen=True)
class Case:
    """A call of a wrapper, and the bytes that an iteration of a kernel's loop moves from or to
    memory, or a whole program without a loop; or the operations of its products, if those take
    longer."""

    name: str
    launch: Callable[[], object]
    moved: dict[str, float]
    multiplied: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled(MachineCode):
    """A kernel in a case."""

    kernel: str
    # Bytes of its loop or program, from ``Case``.
    moved: float
    # Clocks in which the loop's instructions are issued, for each in which its bytes are read, or
    # its products are taken.
    slots: float

    @property
    def programs(self) -> int:
        """Those that registers and shared memory of an H100's processor hold at once."""
        by_registers = REGISTERS // (32 * self.num_warps * self.registers)
        return min(by_registers, PROCESSOR_SHARED_BYTES // (self.shared + RESERVED_SHARED_BYTES))

    def __str__(self) -> str:
        limit = "the tensor cores" if self.kernel in CHUNKS else "memory"
        counted = f", {self.slots:.2f} slots a clock of {limit}" if self.slots else ""
        return (
            f"{self.registers} registers, {self.stack} B stack, {self.local} B local, "
            f"{self.shared} B shared, {self.asynchronous} asynchronous copies of 16 B{counted}"
        )


# ---- the launches --------------------------------------------------------------------------------


def attention(
    model: str,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    **params: Any,
) -> Case:
    """Attention of a decoding row."""
    attention_params = AttentionParams(dim**-0.5, **params)

    def launch() -> None:
        kv = _cache(cache_dtype, kv_heads, dim)
        q = torch.empty(1, heads, dim, dtype=q_dtype, device=META)
        decodes = decode_metadata([SequenceMetadata(slice(0, 1), 40, [0, 1, 2], 16)], META)
        assert decodes is not None
        sinks = torch.empty(heads, device=META) if attention_params.sinks else None
        paged_decode.paged_decode(q, kv, kv, decodes, attention_params, torch.empty_like(q), sinks)

    processors = paged_decode.processors(META)
    constants = paged_decode.constants(
        q_dtype, cache_dtype, heads, kv_heads, dim, attention_params, 16, processors
    ).attend
    token = dim * cache_dtype.itemsize + (4 if cache_dtype == INT8 else 0)
    kinds = [_short(q_dtype), _short(cache_dtype), *(f"{name}" for name in params)]
    return Case(f"{model} {' '.join(kinds)}", launch, {"_attend": 2 * constants["BLOCK_N"] * token})


def chunks(
    model: str,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    spans: bool = False,
    **params: Any,
) -> Case:
    """Attention of a chunk."""
    attention_params = AttentionParams(dim**-0.5, **params)
    operations: dict[str, float] = {}

    def launch() -> None:
        q = torch.empty(40, heads, dim, dtype=q_dtype, device=META)
        kv = _cache(cache_dtype, kv_heads, dim)
        metadata = chunk_metadata([SequenceMetadata(slice(0, 40), 0, [0, 1, 2], 16)], META)
        assert metadata is not None
        sinks = torch.empty(heads, device=META) if attention_params.sinks else None
        ends = torch.empty(40, dtype=torch.int32, device=META) if spans else None
        chunk_attention.chunk_attention(
            q, kv, kv, metadata, attention_params, torch.empty_like(q), sinks, ends
        )
        fixed = chunk_attention.constants(  # which depend on the GPU to compile for
            q_dtype, cache_dtype, heads, kv_heads, dim, attention_params, 16
        )
        if q_dtype != torch.float32:
            tile = fixed["BLOCK_M"] * fixed["BLOCK_N"] * fixed["BLOCK_D"]
            operations["_attend_chunks"] = 4.0 * tile

    kinds = [_short(q_dtype), _short(cache_dtype), *params, *(["spans"] if spans else [])]
    return Case(f"{model} {' '.join(kinds)}", launch, {}, operations)


def _cache(dtype: torch.dtype, kv_heads: int, dim: int) -> CachedKV:
    values = torch.empty(kv_heads, 64, dim, dtype=dtype, device=META)
    scales = torch.empty(kv_heads, 64, 1, device=META)
    return ScaledKV(values, scales) if dtype == INT8 else values


def latent_attention(
    model: str,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    dims: tuple[int, int, int] = (128, 64, 512),
) -> Case:
    """Attention of a decoding row and of a chunk to latents, of DeepSeek's sizes unless others are
    given, and their write to the cache."""
    nope, rope, width = dims
    operations: dict[str, float] = {}

    def launch() -> None:
        empty = partial(torch.empty, device=META)
        cache = empty(1, 64, width + rope, dtype=cache_dtype)
        latents = ScaledKV(cache, empty(1, 64, 1)) if cache_dtype == INT8 else cache
        q = empty(1, heads, nope + rope, dtype=q_dtype)
        decodes = decode_metadata([SequenceMetadata(slice(0, 1), 40, [0, 1, 2], 16)], META)
        assert decodes is not None
        wide = empty(heads, 1, width, dtype=q_dtype)
        latent_decode.latent_decode(q, wide, latents, decodes, 0.1, torch.empty_like(wide))
        kv, slots = empty(1, width + rope, dtype=q_dtype), empty(1, dtype=torch.int64)
        weight, angles = empty(width, dtype=q_dtype), empty(1, 1, rope)
        latent_store.rope_and_cache_latent(q, kv, weight, 1e-6, (angles, angles), latents, slots)
        metadata = chunk_metadata([SequenceMetadata(slice(0, 40), 0, [0, 1, 2], 16)], META)
        assert metadata is not None
        q, wide = (
            empty(40, heads, nope + rope, dtype=q_dtype),
            empty(heads, 40, width, dtype=q_dtype),
        )
        latent_chunks.latent_chunks(q, wide, latents, metadata, 0.1, wide)
        fixed = latent_chunks.constants(  # which depend on the GPU to compile for
            q_dtype, cache_dtype, heads, nope, rope, width, 16
        )
        if q_dtype != torch.float32:
            tile = fixed["BLOCK_M"] * fixed["BLOCK_N"]
            operations["_attend_latent_chunks"] = 2.0 * tile * (2 * width + rope)

    if "odd" in model:
        return Case(model, launch, {})
    constants = latent_decode.constants(
        q_dtype, cache_dtype, heads, nope, rope, width, 16, paged_decode.processors(META)
    ).attend
    token = (width + rope) * cache_dtype.itemsize + (4 if cache_dtype == INT8 else 0)
    name = f"{model} {_short(q_dtype)} {_short(cache_dtype)}"
    return Case(name, launch, {"_attend_latents": constants["BLOCK_N"] * token}, operations)


def product(kind: BlockFormat, dtype: torch.dtype, rows: int) -> Case:
    """The product with a weight in blocks."""
    weight = _weight(kind)
    x = torch.empty(rows, weight.inputs, dtype=dtype, device=META)
    return Case(
        f"{kind.name} {_short(dtype)} {rows}",
        lambda: quantized_linear.multiply(x, weight),
        {"_multiply": _bytes_of_a_step(weight, rows)},
    )


def skinny(outputs: int, inputs: int, dtype: torch.dtype, rows: int) -> Case:
    """The product with an unquantised weight."""
    warps = skinny_linear.warps_of(outputs, inputs, META)
    step = min(inputs, warps * skinny_linear._WARP_INPUTS)

    def launch() -> None:
        x, weight = (torch.empty(n, inputs, dtype=dtype, device=META) for n in (rows, outputs))
        skinny_linear.multiply(x, weight, None, warps)

    return Case(
        f"{outputs} x {inputs} {_short(dtype)} {rows}",
        launch,
        {"_multiply_skinny": 8.0 * step * dtype.itemsize},
    )


def decoding(kind: BlockFormat, dtype: torch.dtype) -> Case:
    """A weight in blocks as numbers."""
    weight = _weight(kind)
    return Case(
        f"{kind.name} {_short(dtype)}",
        lambda: quantized_linear.decode(weight, slice(None), dtype),
        {},
    )


def experts(kind: BlockFormat | None, rows: int) -> Case:
    """The products of experts with blocks of so many rows, with plain weights or those in a
    format, and the sum of what they find."""
    bf16 = torch.bfloat16
    weight = None if kind is None else _weight(kind)
    moved = {} if weight is None else {"_multiply": _bytes_of_a_step(weight, rows)}
    if kind is None:
        outputs, inputs = grouped_product.ROWS[rows]
        moved = {"_multiply_plain": 2.0 * outputs * inputs}

    def launch() -> None:
        expert_ids = torch.empty(rows, 2, dtype=torch.int64, device=META)
        plan = row_blocks(expert_ids, 3, grouped_product.ROWS)
        assert plan.rows == rows
        x = torch.empty(rows, 2048, dtype=bf16, device=META)
        if weight is None:
            stacked = torch.empty(3, 64, 2048, dtype=bf16, device=META)
            products = grouped_product.multiply_experts(x, stacked, plan)
        else:
            products = quantized_linear.multiply_grouped(x, stack_packed([weight] * 3, 3), plan)
        shares = torch.empty(rows, 2, device=META)
        for out in (None, torch.empty_like(x[:, :64])):
            grouped_product.add_weighted(products, shares, plan, out)

    name = "experts" if kind is None else f"experts {kind.name}"
    return Case(f"{name} bf16 {rows}", launch, moved)


def plan(count: int) -> Case:
    """The plan of rows for so many experts."""

    def launch() -> None:
        expert_ids = torch.empty(64, 8, dtype=torch.int64, device=META)
        row_plan.plan_rows(expert_ids, count, grouped_product.ROWS)

    return Case(f"{count} experts", launch, {})


def choice(model: str, experts: int, routing: Routing) -> Case:
    """The choice of experts from logits."""

    def launch() -> None:
        gpu_routing.choose_experts(torch.empty(4, experts, device=META), routing)

    return Case(model, launch, {})


def logits(experts: int, inputs: int, rows: int) -> Case:
    """The logits of so many rows, from which experts are chosen."""
    routing = Routing("softmax", 8, None, True, 1.0)

    def launch() -> None:
        x, weight = (
            torch.empty(n, inputs, dtype=torch.bfloat16, device=META) for n in (rows, experts)
        )
        gpu_routing.choose_experts(router.multiply_router(x, weight), routing)

    return Case(f"{experts} experts {inputs} bf16 {rows}", launch, {})


def _bytes_of_a_step(weight: PackedCodes, rows: int) -> float:
    constants = quantized_linear.constants(weight, rows)
    chunks = constants["WARPS"] * constants["TILES"]
    scales = TILE * CHUNK / weight.group * (2 if weight.minimums is None else 4)
    return float(chunks * (4 * constants["LENGTH"] + scales))


def _weight(kind: BlockFormat) -> PackedCodes:
    # So many inputs that they are divided between programs.
    blocks = torch.empty(64, 2048 // kind.values * kind.nbytes, dtype=torch.uint8, device=META)
    return pack(QuantizedWeight(kind, blocks))


def _distinct_formats() -> Iterable[BlockFormat]:
    """A format for each kernel that one of them needs."""
    others = group_format("e4m3", 8, 128, "F32"), group_format("int", 4, 128, "F16", "zero")
    formats: dict[tuple[object, ...], BlockFormat] = {}
    for kind in (*BLOCK_FORMATS.values(), *others):
        if takes(kind):
            constants = quantized_linear.constants(_weight(kind), 1)
            constants["ZERO"] = None  # the number that is subtracted makes no other instructions
            formats.setdefault(tuple(constants.values()), kind)
    return formats.values()


def copy(name: str, widths: Sequence[int], tokens: int, *, scatter: bool) -> Case:
    """The copy of a frame whose components have so many words a token, to or from the cache."""

    def launch() -> None:
        blocks = torch.empty(64, dtype=torch.int32, device=META)
        cells = FrameCells(range(3), range(2), blocks, 5, 5 + tokens)
        frame = torch.empty(24 * tokens * sum(widths), dtype=torch.uint8, device=META)
        pointers = torch.empty(4, len(widths), dtype=torch.int64, device=META)
        frame_copy.copy_frame(pointers, widths, 1024, 16, cells, frame, scatter=scatter)

    constants = frame_copy.constants(widths, len(widths), 16, aligned=True, scatter=scatter)
    moved = 2 * 4 * constants["TOKENS"] * sum(widths)
    return Case(f"{name} {'in' if scatter else 'out'}", launch, {"_copy_frame": moved})


def step_inputs() -> Case:
    """The inputs of a step: a few rows' are small beside a launch, so bytes are not counted."""

    def launch() -> None:
        inputs, changes = (torch.empty(s, dtype=torch.int32, device=META) for s in ((4, 9), (7, 2)))
        tables = torch.empty(8, 64, dtype=torch.int32, device=META)
        last_tokens = torch.empty(8, dtype=torch.int32, device=META)
        staged = torch.empty(3, 9, dtype=torch.int64, device=META)
        stage_inputs(inputs, changes, tables, last_tokens, staged)

    return Case("step inputs", launch, {})


def norms(width: int, dtype: torch.dtype) -> Case:
    """The norm of a row, with and without an addition."""

    def launch() -> None:
        x = torch.empty(4, width, dtype=dtype, device=META)
        norm.rms_norm(x, x[0], 1e-6)
        norm.add_rms_norm(x, x, x[0], 1e-6)

    return Case(f"{width} {_short(dtype)}", launch, {"_rms_norm": 2 * width * dtype.itemsize})


def gated(kind: Activation, width: int, dtype: torch.dtype) -> Case:
    """A gated activation."""
    x = torch.empty(4, 2 * width, dtype=dtype, device=META)
    return Case(
        f"{kind} {_short(dtype)}",
        lambda: activation.act_and_mul(x, kind),
        {"_act_and_mul": 3 * 1024 * dtype.itemsize},
    )


def rope(
    model: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    rotated: int | None = None,
    normed: bool = False,
) -> Case:
    """The rotation of a row's heads and their write to the cache. Instructions are counted where
    there are only queries: the other kernels consist of three of these."""
    turned = dim if rotated is None else rotated

    def launch() -> None:
        angles = torch.empty(4, 1, turned, device=META)
        weight = torch.empty(heads + kv_heads, dim, dtype=dtype, device=META) if normed else None
        x = torch.empty(4, heads + 2 * kv_heads, dim, dtype=dtype, device=META)
        if cache_dtype is None:
            rope_store.rope_queries(x, weight, 1e-6, (angles, angles))
            return
        values = torch.empty(kv_heads, 64, dim, dtype=cache_dtype, device=META)
        scales = torch.empty(kv_heads, 64, 1, device=META)
        kv = ScaledKV(values, scales) if cache_dtype == INT8 else values
        slots = torch.empty(4, dtype=torch.int64, device=META)
        rope_store.rope_and_cache_kv(x, weight, 1e-6, (angles, angles), (kv, kv), slots)

    kinds = [_short(each) for each in (dtype, cache_dtype) if each is not None]
    moved = {} if cache_dtype else {"_rope_store": 2.0 * heads * dim * dtype.itemsize}
    return Case(f"{model} {' '.join(kinds)}", launch, moved)


def sampling_rows(vocab: int) -> Case:
    """The draws of some rows, with everything that they may use."""

    def launch() -> None:
        table = torch.empty(9, sampling_table.COLUMNS.value, dtype=torch.int64, device=META)
        slots = torch.empty(4, dtype=torch.int32, device=META)
        logits = torch.empty(4, vocab, device=META)
        sampling_table.set_columns(table, torch.empty(9, 2, dtype=torch.int64, device=META))
        sampling.draw_tokens(table, slots, logits, slots.new_empty(9))
        sampling.draw_tokens(table, slots, logits, slots.new_empty(9), filtered=False)

    block = 4.0 * sampling.BLOCK
    moved = {"_measure": block, "_narrow": 4.0 * sampling_floors.TILE, "_gather": block}
    return Case(f"{vocab} tokens", launch, moved)


def _short(dtype: torch.dtype) -> str:
    return "fp8" if dtype == FP8 else str(dtype).removeprefix("torch.")


def cases(generation: int) -> Iterator[Case]:
    """The launches of a step. Where instructions are counted, and in the full extent, these are all
    models, formats and numbers of rows; elsewhere each dtype, each option of a kernel, and its
    fewest and most rows; and what converts fp8 without much shared memory."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    if generation == CONVERTING:
        yield attention("Llama-3-8B", bf16, FP8, 32, 8, 128)
        yield chunks("Llama-3-8B", bf16, FP8, 32, 8, 128)
        yield latent_attention("DeepSeek-V2-Lite", bf16, FP8, 16)
        return
    every = FULL or generation == COUNTED
    yield step_inputs()
    if every:
        yield attention("Qwen3-0.6B", bf16, bf16, 16, 8, 128)
    yield attention("Llama-3-8B", bf16, bf16, 32, 8, 128)
    yield attention("Llama-3-8B", bf16, FP8, 32, 8, 128)
    yield attention("Llama-3-8B", bf16, INT8, 32, 8, 128)
    yield attention("Llama-3-8B", fp32, fp32, 32, 8, 128)
    yield attention("SmolLM2-135M", fp16, fp16, 9, 3, 64)
    yield attention("Gemma-2-9B", bf16, bf16, 16, 8, 256, soft_cap=50.0, window=4096)
    if not OLDEST:  # whose registers do not suffice for wide heads and groups
        yield attention("Gemma-4", bf16, bf16, 8, 1, 512)
        if every:
            yield attention("Gemma-4", fp32, fp32, 8, 1, 512)
            yield attention("Qwen3-235B", bf16, bf16, 64, 4, 128)
            yield attention("GLM-4-32B", bf16, bf16, 48, 2, 128)
    for kv_dtype in (bf16, INT8) if every else (bf16,):
        yield attention("gpt-oss-20b", bf16, kv_dtype, 64, 8, 64, window=128, sinks=True)
    yield chunks("Llama-3-8B", bf16, bf16, 32, 8, 128)
    yield chunks("Llama-3-8B", bf16, FP8, 32, 8, 128)
    yield chunks("Llama-3-8B", bf16, INT8, 32, 8, 128)
    yield chunks("Llama-3-8B", fp32, fp32, 32, 8, 128)
    yield chunks("SmolLM2-135M", fp16, fp16, 9, 3, 64)
    yield chunks("Gemma-2-9B", bf16, bf16, 16, 8, 256, soft_cap=50.0, window=4096)
    if every:
        yield chunks("gpt-oss-20b", bf16, bf16, 64, 8, 64, window=128, sinks=True)
        yield chunks("Phi-2", fp16, fp16, 32, 32, 80)
        yield chunks("ModernBERT", bf16, bf16, 12, 12, 64, window=64, causal=False)
        yield chunks("Gemma-3-4B", bf16, bf16, 8, 4, 256, spans=True)
        yield chunks("Gemma-4", bf16, bf16, 8, 1, 512)
    for width in (1024, 4096, 16384) if every else (4096,):
        yield norms(width, bf16)
    yield norms(4096, fp32)
    yield gated("silu", 14336, bf16)
    if every:
        yield gated("silu", 3072, bf16)
        yield gated("gelu_tanh", 14336, bf16)
        yield gated("clamped_swiglu", 2880, bf16)
        yield rope("Qwen3-0.6B queries normed", bf16, None, 16, 0, 128, normed=True)
        yield rope("Llama-3-8B queries", bf16, None, 16, 0, 128)
        yield rope("Phi-2", bf16, bf16, 32, 32, 80, rotated=32)
        yield rope("Gemma-3-4B", fp16, INT8, 8, 4, 256, normed=True)
        for cache_dtype in (bf16, FP8, INT8):
            yield rope("Llama-3-8B", bf16, cache_dtype, 32, 8, 128)
    for cache_dtype in (bf16, FP8, INT8):
        yield rope("Qwen3-0.6B", bf16, cache_dtype, 16, 8, 128, normed=True)
    yield rope("Qwen3-0.6B", fp32, fp32, 16, 8, 128, normed=True)
    for kv_dtype in (bf16, FP8, INT8):
        yield latent_attention("DeepSeek-V2-Lite", bf16, kv_dtype, 16)
    yield latent_attention("DeepSeek-V2-Lite", fp32, fp32, 16)
    yield latent_attention("DeepSeek-V3", bf16, bf16, 128)
    yield latent_attention("odd bfloat16", bf16, bf16, 3, (8, 6, 24))
    for scatter in (False, True):
        yield copy("128 bf16", (64, 64), 40, scatter=scatter)
        yield copy("128 int8", (1, 1, 32, 32), 40, scatter=scatter)
    yield copy("128 int8 odd", (1, 1, 32, 32), 33, scatter=True)
    if every:
        yield copy("latent bf16", (256, 32), 40, scatter=False)
        for scatter in (False, True):
            yield copy("128 fp8", (32, 32), 40, scatter=scatter)
    few, most = skinny_linear.ROWS
    yield skinny(4096, 1024, fp16, few)
    if every:
        yield skinny(6144, 4096, bf16, few)
    for outputs, inputs in ((6144, 1024), (1024, 2048), (1024, 3072)) if every else ((1024, 2048),):
        for rows in (few, most):
            yield skinny(outputs, inputs, bf16, rows)
    few, *more = quantized_linear.ROWS
    for kind in _distinct_formats() if every else (Q8_0, Q4_K):
        yield product(kind, bf16, few)
    yield product(Q8_0, fp16, few)
    shown = Q8_0, Q4_0, MXFP4, Q4_K, NVFP4, IQ4_NL  # in docs/kernels.md
    for kind in shown if FULL else (Q8_0, MXFP4, Q4_K, IQ4_NL) if every else (Q8_0, Q4_K):
        yield product(kind, bf16, more[-1])
    for kind in shown if FULL else (MXFP4,) if every else ():
        for rows in more[:-1]:
            yield product(kind, bf16, rows)
    if every:
        yield product(IQ3_S, bf16, more[-1])
        for kind in (Q4_K, IQ3_S, IQ1_M):
            yield decoding(kind, bf16)
    grouped = list(grouped_product.ROWS)
    for rows in grouped if every else (grouped[0], grouped[-1]):
        yield experts(None, rows)
    for kind in (Q4_K, IQ2_S) if every else (IQ2_S,):
        yield experts(kind, few)
    yield plan(128)
    yield choice("Qwen3-30B-A3B", 128, Routing("softmax", 8, None, True, 1.0))
    for rows in (4, router.FEW + 1):
        yield logits(128, 2048, rows)
    yield logits(256, 7168, 4)
    corrected = Routing("sigmoid", 8, torch.empty(256, device=META), True, 2.5, 8, 4, 2)
    yield choice("DeepSeek-V3", 256, corrected)
    yield sampling_rows(151_936)


# ---- what was compiled ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel that a case launches. ``binary`` is what Triton has compiled, None if it is
    recorded."""

    name: str
    digest: str
    case: Case
    binary: Any

    @property
    def moved(self) -> float:
        """The bytes that ``Case`` has of it."""
        return self.case.moved.get(self.name, 0.0)

    @property
    def clocks(self) -> float:
        """Those in which its bytes are read, or its products are taken; 0 if it is not counted."""
        operations = self.case.multiplied.get(self.name, 0.0)
        return max(self.moved / BYTES_A_CLOCK, operations / OPERATIONS_A_CLOCK)


def compile_cases(
    cases: Iterable[Case], generation: int, record: Record
) -> Iterator[tuple[Case, Compiled]]:
    """The kernels that each case launches, all of which are in the record then."""
    kernels = []

    def is_known(kernel: JITFunction[Any], key: str) -> bool:
        return not FULL and digest(kernel, key, generation) in record.read

    def keep(kernel: JITFunction[Any], key: str, binary: Any) -> None:
        name = kernel.fn.__name__
        kernels.append(Kernel(name, digest(kernel, key, generation), case, binary))

    with compiled_for(generation, keep, is_known):
        for case in cases:
            case.launch()
    compiled = {each.digest: each.binary for each in kernels if each.binary is not None}
    loops = _loops([*compiled.values()], generation) if generation == COUNTED else repeat(0)
    codes = dict(zip(compiled, map(_measured, compiled.values(), loops), strict=False))
    for kernel in kernels:
        code = codes.get(kernel.digest) or record.read[kernel.digest]
        record.note(kernel.digest, generation, f"{kernel.name[1:]} {kernel.case.name}", code)
        slots = 0.0
        if kernel.clocks and generation == COUNTED:
            slots = code.instructions * code.num_warps / ISSUED_A_CLOCK / kernel.clocks
        yield (
            kernel.case,
            Compiled(**asdict(code), kernel=kernel.name, moved=kernel.moved, slots=slots),
        )


def _measured(binary: Any, instructions: int) -> MachineCode:
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x10,", binary.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\b", binary.asm["ptx"])
    products = re.findall(r"wgmma\.mma_async|tcgen05\.mma", binary.asm["ptx"])
    vectors = len(re.findall(r"(?:ld|st)\.global\S*\.v4\.", binary.asm["ptx"]))
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return MachineCode(
        num_warps=binary.metadata.num_warps,
        registers=counts["REG"],
        stack=counts["STACK"],
        local=counts["LOCAL"],
        shared=binary.metadata.shared,
        asynchronous=len(copies),
        async_products=len(products),
        smallest=min(
            (int(n or 1) * int(bits) // 8 for n, bits in accesses if n or bits != "64"), default=16
        ),
        vectors=vectors * 16 * 32 * binary.metadata.num_warps,
        instructions=instructions,
    )


def _loops(binaries: Sequence[Any], generation: int) -> Iterator[int]:
    """The instructions of each one's loop. All are disassembled at once, one behind the other:
    the tool takes a quarter of a second to start."""
    codes = [_code(each.asm["cubin"]) for each in binaries]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        lines = _run("nvdisasm", "--binary", f"SM{generation}", file.name).splitlines()
    addressed = [(int(m[1], 16), line) for line in lines if (m := re.search(_ADDRESS, line))]
    first = length = 0
    for code in codes:
        length += len(code)
        end = bisect_left(addressed, (length,))
        yield count_instructions("\n".join(line for _, line in addressed[first:end]))
        first = end


_ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/")


def _code(cubin: bytes) -> bytes:
    """The machine code in a 64-bit ELF file: its one section ``.text.KERNEL``."""
    sections, size, count, names = (
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<3H", cubin, 0x3A),
    )
    headers = [struct.unpack_from("<2I4Q", cubin, sections + size * n) for n in range(count)]
    texts = headers[names][4]
    machine_code = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin.startswith(b".text.", texts + name)
    ]
    (code,) = machine_code
    return code


def _run(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count_instructions(sass: str) -> int:
    """The instructions of the longest loop without another in it, which are those between a branch
    backwards and its target, if any of them has products, of those; of a kernel without a loop, all
    before its end."""
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    places = {int(address, 16): index for index, (address, _) in enumerate(instructions)}
    loops = []
    for index, (_, text) in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        start = index if target is None else places.get(int(target[1], 16), index)
        if start < index:  # the end of each kernel is a branch to itself
            loops.append((start, index + 1))
    inner = [
        (any("MMA" in text for _, text in instructions[start:end]), end - start)
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    if inner:
        return max(inner)[1]
    ends = [index for index, (_, text) in enumerate(instructions) if text.strip() == "EXIT"]
    return ends[-1] + 1


def check(name: str, usage: Compiled, generation: int) -> list[str]:
    """List the problems of a compiled kernel."""
    wrong = []
    words = set(name.split())
    if usage.kernel == "_attend_latents" and words & {"int8", "fp8"}:
        max_stack: float = LATENT_STACK * SHUFFLED
    elif usage.kernel == "_attend_latent_chunks" and words & {"int8", "fp8"}:
        max_stack = LATENT_CHUNKS_STACK if generation >= 100 or OLDEST else SMALL_STACK
    else:
        small = usage.kernel in ("_multiply", *(OLDEST_SPILLS if OLDEST else ()))
        max_stack = SMALL_STACK if small else 0
    if usage.stack > max_stack or usage.local:
        wrong.append("spills registers")
    max_registers = REGISTERS // 128 // PROGRAMS[usage.kernel]
    if usage.registers > max_registers:
        wrong.append(f"more than {max_registers} registers a thread")
    if usage.registers * 32 * usage.num_warps > REGISTERS:
        wrong.append("more registers than a processor has")
    wide = usage.kernel in CHUNKS and generation >= 90
    max_shared = WIDE_SHARED_BYTES if wide else SHARED_BYTES
    if usage.shared > max_shared:
        wrong.append(f"more than {max_shared} bytes of shared memory")
    # Scales are single words, and frames that begin in the middle of a vector are read by words.
    vectors = usage.moved * (7 / 8) / (2 if "odd" in words else 1)
    if usage.kernel == "_copy_frame" and usage.vectors < vectors:
        wrong.append("moves less than 16 bytes at a time")
    # A head's int8 have one scale, and half of Phi-2's rotated dimensions have 32 bytes.
    least = 4 if words & {"int8", "Phi-2"} else 8 if "fp8" in words else 16
    if usage.kernel in VECTORED and usage.smallest < least:
        wrong.append(f"reads or writes less than {least} bytes at a time")
    if usage.kernel in WIDE and usage.vectors < usage.moved:
        wrong.append("reads less than 16 bytes at a time")
    # Latents of fp8 are not where it is widened by bits, in the order of bytes.
    of_latents = usage.kernel in ("_attend_latents", "_attend_latent_chunks")
    launched = max(1, paged_decode._WARPS // usage.num_warps)
    programs = min(usage.programs, launched) if usage.kernel == "_attend" else usage.programs
    decodes = usage.kernel in ("_attend", "_attend_latents") and generation == COUNTED
    if decodes and "odd" not in words and programs * usage.moved < BYTES_ON_THEIR_WAY:
        wrong.append(f"has few bytes on their way to a processor: {programs * usage.moved:.0f}")
    if of_latents and "odd" in words and usage.asynchronous:
        wrong.append("copies 16 bytes at a time from rows that are aligned to fewer")
    copies = usage.kernel == "_attend" or (of_latents and not words & {"fp8", "odd"})
    copies = copies or (usage.kernel == "_attend_chunks" and "float32" not in words)
    if usage.kernel == "_attend_latent_chunks" and "int8" in words and generation >= 100:
        copies = not OLDEST  # which does not pipeline it
    if copies and not usage.asynchronous:
        wrong.append("does not copy keys and values asynchronously")
    if wide and not usage.async_products and not words & {"float32", "odd"}:
        wrong.append("does not multiply asynchronously")
    bar = next((limit for key, limit in SLOW if words.issuperset(key.split())), MAX_SLOTS)
    shuffled = usage.kernel == "_multiply" or of_latents or words & {"int8", "latent"}
    if usage.slots > bar * (SHUFFLED if shuffled else 1):
        wrong.append("issues too many instructions for the bytes or products of its loop")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.kernels.compile_ahead")
    parser.add_argument("generations", nargs="*", type=int, default=COMPILED, metavar="GENERATION")
    parser.add_argument("--record", action="store_true", help="compile and record all")
    options = parser.parse_args()
    if options.record and options.generations is not COMPILED:
        parser.error("--record is for all generations: name none")
    print("Triton", triton.__version__)
    ignore_lines()
    record = Record({}) if options.record else read_record(options.generations)
    failed, reported = False, set()
    for generation in options.generations:
        for case, usage in compile_cases(cases(generation), generation, record):
            name = f"{usage.kernel[1:]} {case.name}"
            if usage.kernel in ("_list_splits", "_add") and (generation, usage) in reported:
                continue  # it is the same for most
            reported.add((generation, usage))
            wrong = check(name, usage, generation)
            failed = failed or bool(wrong)
            messages = (f"FAILED: {each}" for each in wrong)
            print(generation, f"{name}: {usage}", *messages, sep="  ", flush=True)
    if options.record:
        record.write()
    elif record.read:
        for difference in record.differences():
            failed = True
            print(f"FAILED: {difference}. If meant: make kernels")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
