"""The compiled kernels against torch's, at odd sizes, in every type of a weight or a cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionConfig,
    AttentionMetadata,
    AttentionParams,
    DecodeMetadata,
    SequenceMetadata,
    decode_metadata,
)
from tandem.kernels.cpu import jit
from tandem.kernels.errors import KernelUnavailableError
from tandem.kernels.fp8 import FP8
from tandem.kernels.operators import Operators
from tandem.kernels.reference.attention import paged_attention
from tandem.kernels.reference.cache import write_kv
from tandem.kernels.scaled import INT8, CachedKV, ScaledKV, TensorScaledKV
from tandem.shared.kv.cache import KVCache
from tandem.tests.support.extent import selected

from ..shared.kv.test_cache import DIM, KV_HEADS, SPEC

jit.prepare()

from tandem.kernels.cpu.chunk_attention import chunk_attention  # noqa: E402
from tandem.kernels.cpu.linear import PackedWeight  # noqa: E402
from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402

ACTIVATIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Each dtype is compiled, which is what takes the time here.
ALL = selected([torch.float32, torch.bfloat16], full=[torch.float16])
DTYPES = pytest.mark.parametrize("dtype", ALL, ids=str)
# Of activations and the cache.
PAIRS = pytest.mark.parametrize(
    ("activations", "dtype"),
    selected(
        [
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
        ],
        full=[
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
            (torch.bfloat16, torch.float16),
        ],
    ),
    ids=str,
)
BLOCK = 4
reference = Operators()
# For heads of 8.
PARAMS = AttentionParams(8**-0.5)


def batched(sequences: list[SequenceMetadata], decodes: DecodeMetadata | None) -> AttentionMetadata:
    return AttentionMetadata(sequences, torch.empty(0, dtype=torch.int64), decodes)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def compiled() -> CompiledOperators:
    return CompiledOperators()


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 31, 32, 101])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (37, 99), (1037, 1030)])
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(
        PackedWeight(weight)(x), expected, atol=1e-4 * inputs**0.5, rtol=1e-5
    )


def test_a_row_has_the_same_product_in_any_batch() -> None:
    panels, x = PackedWeight(torch.randn(99, 1500).bfloat16()), torch.randn(49, 1500)
    whole = panels(x)
    for first, end in ((0, 1), (3, 5), (7, 10), (11, 15), (15, 20), (20, 26), (0, 13), (3, 40)):
        assert torch.equal(panels(x[first:end]), whole[first:end])


@pytest.mark.parametrize("faster", [True, False])
def test_torch_takes_the_products_that_it_is_faster_in(
    compiled: CompiledOperators, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    monkeypatch.setattr("tandem.kernels.cpu.operators._blocked", lambda dtype: faster)
    product = compiled.prepare_linear(torch.ones(3, 2), None)
    assert isinstance(product, PackedWeight) != faster
    for in_pairs in (False, True):
        monkeypatch.setattr(
            "tandem.kernels.cpu.operators._in_pairs",
            lambda dtype, in_pairs=in_pairs: in_pairs and dtype == torch.bfloat16,
        )
        activations = compiled.activation_dtype(torch.bfloat16, torch.device("cpu"))
        assert activations == (torch.bfloat16 if faster and not in_pairs else torch.float32)


def test_a_product_of_no_rows(compiled: CompiledOperators) -> None:
    assert compiled.prepare_linear(torch.randn(37, 8), torch.randn(37))(
        torch.randn(0, 8)
    ).shape == (0, 37)


def test_a_bias_is_added(compiled: CompiledOperators, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kernels.cpu.operators._blocked", lambda dtype: False)
    weight, bias = torch.randn(37, 8).bfloat16(), torch.randn(37).bfloat16()
    x = torch.randn(3, 8)
    expected = x @ weight.float().T + bias.float()
    torch.testing.assert_close(compiled.prepare_linear(weight, bias)(x), expected)


def test_nan_and_infinity_are_not_lost() -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [1.0, 1.0]])
    result = PackedWeight(torch.ones(3, 2))(x)
    assert result[0].isnan().all()
    assert result[1].isposinf().all()
    assert (result[2] == 2).all()


@ACTIVATIONS
@pytest.mark.parametrize("rows", [0, 1, 19, 99])
def test_norms(compiled: CompiledOperators, rows: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, 65).to(dtype)
    weight = torch.randn(65).to(dtype)
    torch.testing.assert_close(
        compiled.rms_norm(x[:, :65], weight, 1e-6),
        reference.rms_norm(x.float(), weight.float(), 1e-6).to(dtype),
    )
    normed, total = compiled.add_rms_norm(x, residual, weight, 1e-6)
    assert total.equal(x + residual)
    expected = reference.rms_norm(total.float(), weight.float(), 1e-6).to(dtype)
    torch.testing.assert_close(normed, expected)


def test_a_norm_of_a_part_of_a_row(compiled: CompiledOperators) -> None:
    x, weight = torch.randn(7, 20), torch.randn(13)
    result = compiled.rms_norm(x[:, 5:18], weight, 1e-6)
    torch.testing.assert_close(result, reference.rms_norm(x[:, 5:18], weight, 1e-6))


@ACTIVATIONS
@pytest.mark.parametrize("rows", [0, 1, 19, 99])
def test_silu_and_mul(compiled: CompiledOperators, rows: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 38) * 10).to(dtype)
    expected = reference.act_and_mul(x.float(), "silu").to(dtype)
    torch.testing.assert_close(compiled.act_and_mul(x, "silu"), expected)


def test_silu_far_from_zero(compiled: CompiledOperators) -> None:
    x = torch.tensor([[-1e30, -200.0, -88.5, 88.5, 200.0, 1e30, torch.nan], [1.0] * 7]).view(1, 14)
    torch.testing.assert_close(
        compiled.act_and_mul(x, "silu"),
        reference.act_and_mul(x, "silu"),
        atol=1e-35,
        rtol=1e-5,
        equal_nan=True,
    )


@PAIRS
@pytest.mark.parametrize("rows", [1, 5, 99])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_kv(
    compiled: CompiledOperators,
    rows: int,
    normed: bool,
    dtype: torch.dtype,
    activations: torch.dtype,
    rotated: int = 10,
) -> None:
    heads, kv_heads, dim = 6, 2, 10
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(activations)
    weight = torch.randn(heads + kv_heads, dim).to(activations) if normed else None
    turns = torch.rand(rows, 1, rotated // 2) * 100
    cos_sin = turns.cos().repeat(1, 1, 2), torch.cat([-turns.sin(), turns.sin()], -1)
    slots = torch.randperm(120)[:rows]
    caches = torch.zeros(2, 2, kv_heads, 120, dim).to(dtype)
    result = compiled.rope_and_cache_kv(qkv, weight, 1e-6, cos_sin, tuple(caches[0]), slots)
    wide = qkv.float(), None if weight is None else weight.float()
    expected = reference.rope_and_cache_kv(*wide, 1e-6, cos_sin, tuple(caches[1]), slots)
    torch.testing.assert_close(result, expected.to(activations))
    # A sum in another order may round to the next value.
    torch.testing.assert_close(caches[0], caches[1])


@pytest.mark.parametrize("rotated", [0, 6])
def test_heads_may_be_rotated_in_part(compiled: CompiledOperators, rotated: int) -> None:
    test_rope_and_cache_kv(compiled, 5, True, torch.float32, torch.float32, rotated)


def test_gelu_is_left_to_the_reference(compiled: CompiledOperators) -> None:
    x = torch.randn(7, 38)
    assert compiled.act_and_mul(x, "gelu_tanh").equal(reference.act_and_mul(x, "gelu_tanh"))


def test_values_are_rounded_as_torch_rounds_them(compiled: CompiledOperators) -> None:
    # Ties, what overflows, what is too small, NaN.
    edges = [1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, torch.nan, torch.inf, 65520.0]
    for dtype in (torch.bfloat16, torch.float16):
        qkv = torch.cat([torch.randn(2, 3, 8), torch.tensor(edges).expand(1, 3, 8)])
        cos_sin = torch.ones(3, 1, 8), torch.zeros(3, 1, 8)
        keys, values = torch.zeros(2, 1, 3, 8, dtype=dtype)
        compiled.rope_and_cache_kv(qkv, None, 1e-6, cos_sin, (keys, values), torch.arange(3))
        assert values[0, :2].equal(qkv[:2, 2].to(dtype))
        torch.testing.assert_close(
            values[0, 2], qkv[2, 2].to(dtype), rtol=0, atol=0, equal_nan=True
        )


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("group", [1, 3])
def test_paged_attention_of_decoding_and_other_rows(
    compiled: CompiledOperators, dtype: torch.dtype, window: int | None, group: int
) -> None:
    heads, dim, blocks = 2, 9, 200
    # Poisoned: a slot that was not written must not be read.
    keys, values = torch.full((2, heads, blocks * BLOCK, dim), torch.nan, dtype=dtype)
    free = torch.randperm(blocks).tolist()
    contexts, row = [], 0
    for start, count in [(0, 1), (0, 19), (30, 1), (5, 19), (98, 1), (3, 1), (4, 1)]:
        table = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
        for block in table:
            slots = slice(block * BLOCK, (block + 1) * BLOCK)
            keys[:, slots], values[:, slots] = torch.randn(2, heads, BLOCK, dim).to(dtype)
        contexts.append(SequenceMetadata(slice(row, row + count), start, table, BLOCK))
        row += count
    q = torch.randn(row, heads * group, dim)
    params = AttentionParams(dim**-0.5, window)
    metadata = batched(contexts, decode_metadata(contexts, q.device))
    result = compiled.paged_attention(q, keys, values, metadata, params)
    wide = keys.float(), values.float()
    expected = paged_attention(q, *wide, contexts, params)
    for context in contexts:
        # Torch takes the products of other rows in the cache's type.
        exact = context.num_rows == 1 or dtype == torch.float32
        torch.testing.assert_close(
            result[context.rows], expected[context.rows], atol=1e-5 if exact else 0.05, rtol=1e-5
        )


@PAIRS
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 1), (0, 70), (236, 40), (255, 2), (511, 66), (700, 5)]
)
def test_chunks_over_several_blocks_of_tokens(
    dtype: torch.dtype,
    activations: torch.dtype,
    window: int | None,
    start: int,
    count: int,
) -> None:
    heads, dim, blocks = 2, 20, 200
    table = torch.randperm(blocks)[: -(-(start + count) // BLOCK)].tolist()
    context = SequenceMetadata(slice(2, 2 + count), start, table, BLOCK)
    keys, values = torch.full((2, heads, blocks * BLOCK, dim), torch.nan, dtype=dtype)
    for token in range(start + count):
        slot = table[token // BLOCK] * BLOCK + token % BLOCK
        keys[:, slot], values[:, slot] = torch.randn(2, heads, dim).to(dtype)
    params = AttentionParams(dim**-0.5, window)
    for group in (1, 3):
        q = (torch.randn(count + 3, heads * group, dim) * 3).to(activations)
        result = chunk_attention(q, keys, values, [context], params)
        wide = q.float(), keys.float(), values.float()
        expected = paged_attention(*wide, [context], params)
        torch.testing.assert_close(result[context.rows], expected[context.rows].to(activations))


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.4, soft_cap=1.5),
        AttentionParams(0.4, window=40, sinks=True),
        AttentionParams(0.4, window=7, soft_cap=0.8, sinks=True),
        AttentionParams(0.4, causal=False),
        AttentionParams(0.4, window=9, causal=False),
    ],
    ids=str,
)
def test_capped_scores_sinks_and_later_tokens(
    params: AttentionParams, compiled: CompiledOperators
) -> None:
    starts = [(0, 1), (0, 300), (0, 19)] if not params.causal else [(30, 1), (5, 290), (98, 1)]
    contexts, row, block = [], 0, 0
    for start, count in starts:
        blocks = list(range(block, block + -(-(start + count) // BLOCK)))
        contexts.append(SequenceMetadata(slice(row, row + count), start, blocks[::-1], BLOCK))
        row, block = row + count, blocks[-1] + 1
    keys, values = torch.randn(2, 2, block * BLOCK, 20)
    q = torch.randn(row, 6, 20) * 2
    sinks = torch.randn(6) * 3 if params.sinks else None
    expected = paged_attention(q, keys, values, contexts, params, sinks_H=sinks)
    for decodes in (None, decode_metadata(contexts, q.device)):
        metadata = batched(contexts, decodes)
        result = compiled.paged_attention(q, keys, values, metadata, params, sinks)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_capped_scores_that_are_nan_stay_nan(compiled: CompiledOperators) -> None:
    keys, values = torch.randn(2, 1, 40, 8)
    keys[0, 7] = torch.nan
    contexts = [
        SequenceMetadata(slice(0, 20), 0, list(range(5)), BLOCK),
        SequenceMetadata(slice(20, 21), 20, list(range(6)), BLOCK),
    ]
    params = AttentionParams(0.4, soft_cap=1.5)
    metadata = batched(contexts, decode_metadata(contexts, keys.device))
    result = compiled.paged_attention(torch.randn(21, 1, 8), keys, values, metadata, params)
    assert not result[:7].isnan().any()
    assert result[7:].isnan().all()


Coded = tuple[CachedKV, CachedKV]


def coded_kv(kind: str, shape: tuple[int, ...]) -> Coded:
    """An empty cache of eight bits, with scales but for "fp8"."""
    codes = torch.zeros(2, *shape)
    if kind == "int8":
        keys, values = (ScaledKV(each.to(INT8), torch.ones(*shape[:2], 1)) for each in codes)
        return keys, values
    keys, values = codes.to(FP8)
    if kind == "fp8":
        return keys, values
    return TensorScaledKV(keys, 0.25), TensorScaledKV(values, 3.0)


def numbers_of(cached: CachedKV) -> torch.Tensor:
    return cached.float() if isinstance(cached, torch.Tensor) else cached.dequantized()


CODED = pytest.mark.parametrize("kind", ["fp8", "scaled fp8", "int8"])


@CODED
def test_numbers_become_the_codes_that_torch_makes_of_them(
    compiled: CompiledOperators, kind: str
) -> None:
    """Those of all sizes, ties, what is beyond the largest, and none."""
    everywhere = torch.randn(60, 1, 8) * torch.logspace(-12, 4, 60)[:, None, None]
    ties = (torch.arange(-480, 480) / 2**10).view(-1, 1, 8)
    no_numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e9, -1e9, 449, 464, -0.0])
    x = torch.cat([everywhere, ties, no_numbers.expand(1, 1, 8), torch.zeros(1, 1, 8)])
    angles = torch.ones(len(x), 1, 8), torch.zeros(len(x), 1, 8)
    ours, theirs = (coded_kv(kind, (1, len(x), 8)) for _ in range(2))
    slots = torch.arange(len(x))
    for operators, cache in ((compiled, ours), (reference, theirs)):
        operators.rope_and_cache_kv(x.repeat(1, 3, 1), None, 1e-6, angles, cache, slots)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            numbers_of(one), numbers_of(other), atol=0, rtol=0, equal_nan=True
        )


@CODED
@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_a_cache_in_eight_bits(
    compiled: CompiledOperators, kind: str, window: int | None
) -> None:
    heads, dim, contexts, row, block = 2, 20, [], 0, 0
    for start, count in ((0, 1), (0, 300), (30, 1), (5, 290), (98, 1)):
        blocks = list(range(block, block + -(-(start + count) // BLOCK)))
        contexts.append(SequenceMetadata(slice(row, row + count), start, blocks[::-1], BLOCK))
        row, block = row + count, blocks[-1] + 1
    slots = torch.arange(block * BLOCK)
    cache = coded_kv(kind, (heads, len(slots), dim))
    sizes = torch.randn(len(slots), heads, 1).exp()
    write_kv(*cache, slots, *(torch.randn(2, len(slots), heads, dim) * sizes))
    q, params = torch.randn(row, 3 * heads, dim) / 2, AttentionParams(dim**-0.5, window)
    wide = numbers_of(cache[0]), numbers_of(cache[1])
    expected = paged_attention(q, *wide, contexts, params)
    metadata = batched(contexts, decode_metadata(contexts, q.device))
    result = compiled.paged_attention(q, *cache, metadata, params)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_queries_need_not_lie_in_order(compiled: CompiledOperators) -> None:
    keys, values = torch.randn(2, 2, 40, 8)
    q = torch.randn(4, 21, 8).transpose(0, 1)
    contexts = [
        SequenceMetadata(slice(0, 20), 0, list(range(5)), BLOCK),
        SequenceMetadata(slice(20, 21), 9, list(range(5)), BLOCK),
    ]
    expected = paged_attention(q, keys, values, contexts, PARAMS)
    for decodes in (None, decode_metadata(contexts, q.device)):
        result = compiled.paged_attention(q, keys, values, batched(contexts, decodes), PARAMS)
        torch.testing.assert_close(result, expected)


def test_a_chunk_with_a_value_that_is_no_number_does_not_hide_it() -> None:
    keys, values = torch.randn(2, 1, 40, 8)
    keys[0, 7] = torch.nan
    q = torch.randn(20, 1, 8)
    context = SequenceMetadata(slice(0, 20), 0, list(range(5)), BLOCK)
    result = chunk_attention(q, keys, values, [context], PARAMS)
    assert not result[:7].isnan().any()
    assert result[7:].isnan().all()


def config_of(cache_dtype: torch.dtype) -> AttentionConfig:
    return AttentionConfig(torch.device("cpu"), torch.float32, cache_dtype, 3, 1, 8, BLOCK, PARAMS)


@pytest.mark.parametrize("weights", ALL, ids=str)
def test_no_step_waits_for_the_compiler(compiled: CompiledOperators, weights: torch.dtype) -> None:
    """Everything was compiled before, for any shapes and strides."""
    from tandem.kernels.cpu import chunk_attention as chunks
    from tandem.kernels.cpu import decode_attention, linear, pointwise

    cpu = torch.device("cpu")
    activations = compiled.activation_dtype(weights, cpu)
    config = AttentionConfig(cpu, activations, torch.bfloat16, 3, 1, 8, BLOCK, PARAMS)
    assert compiled.prepare_batched_decode(config)
    compiled.prepare_linear(torch.ones(1, 1).to(weights), None)
    kernels = [
        *(pointwise.rms_norm, pointwise.add_rms_norm, pointwise.silu_and_mul),
        *(pointwise.rope_and_cache_kv, decode_attention.attend, chunks._pack, chunks._attend),
        *(linear.multiply_panels, linear._multiply_packed),
    ]
    before = [len(kernel.signatures) for kernel in kernels]
    test_norms(compiled, 19, activations)
    test_silu_and_mul(compiled, 19, activations)
    test_rope_and_cache_kv(compiled, 5, True, torch.bfloat16, activations)
    test_rope_and_cache_kv(compiled, 5, False, torch.bfloat16, activations)
    if activations == torch.float32:
        test_a_norm_of_a_part_of_a_row(compiled)
        test_paged_attention_of_decoding_and_other_rows(compiled, torch.bfloat16, None, 3)
    test_chunks_over_several_blocks_of_tokens(torch.bfloat16, activations, None, 3, 9)
    weight = torch.randn(37, 99).to(weights)
    for rows in (7, 99):
        compiled.prepare_linear(weight, None)(torch.randn(rows, 99).to(activations))
    assert [len(kernel.signatures) for kernel in kernels] == before


@ACTIVATIONS
@pytest.mark.parametrize("dim", [8, 80])
def test_decoding_rows_of_either_type(
    compiled: CompiledOperators, dtype: torch.dtype, dim: int
) -> None:
    keys, values = torch.randn(2, 2, 80, dim).bfloat16()
    contexts = [
        SequenceMetadata(slice(row, row + 1), 9 * row, list(range(20)), BLOCK) for row in range(5)
    ]
    q = torch.randn(5, 6, dim).to(dtype)
    metadata = batched(contexts, decode_metadata(contexts, q.device))
    result = compiled.paged_attention(q, keys, values, metadata, PARAMS)
    wide = q.float(), keys.float(), values.float()
    torch.testing.assert_close(result, paged_attention(*wide, contexts, PARAMS).to(dtype))


def test_without_numba_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    with pytest.raises(KernelUnavailableError, match="numba"):
        jit.prepare.__wrapped__()


@pytest.mark.parametrize("size", [64, 192, 4096, 48])
@pytest.mark.parametrize("shift", [0, 4], ids=["aligned", "not aligned"])
def test_copies_of_blocks(compiled: CompiledOperators, size: int, shift: int) -> None:
    """Of some heads, and to a part of a larger buffer; only blocks of whole lines are compiled."""
    random = np.random.default_rng(0)
    memory = random.integers(0, 256, 4 * 9 * size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    cache = memory[start : start + 4 * 9 * size].reshape(4, 9, size)
    copies, indices = compiled.prepare_block_copies(), np.array([7, 0, 8, 3, 3])
    buffer = np.zeros((2, 6 * size), np.uint8)
    copies.gather(cache[1:3], indices, buffer[:, size:].reshape(2, 5, size))
    expected = cache[1:3, indices]
    assert (buffer[:, size:].reshape(2, 5, size) == expected).all()
    assert not buffer[:, :size].any()
    source = random.integers(0, 256, (2, 4, size), np.uint8)
    expected = cache.copy()
    expected[1:3, indices[:4]] = source
    copies.scatter(cache[1:3], indices[:4], source)
    assert (cache == expected).all()


def test_a_cache_with_compiled_copies_packs_the_same(compiled: CompiledOperators) -> None:
    caches = [
        KVCache(SPEC, num_blocks=12, block_size=8, dtype=torch.float32, operators=operators)
        for operators in (compiled, reference)
    ]
    table, values = [11, 2, 3, 7], torch.randn(2, KV_HEADS, 30 - 3, DIM)
    buffers = [bytearray(values.nbytes) for _ in caches]
    for cache, out in zip(caches, buffers, strict=True):
        cache.scatter(1, table, 3, 30, values.numpy().data)
        cache.pack(1, table, 3, 30, out)
    assert buffers[0] == buffers[1] == values.numpy().tobytes()
