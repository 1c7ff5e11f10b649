"""The torch kernels against their textbook definitions, at odd sizes."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionMetadata,
    AttentionParams,
    SequenceMetadata,
)
from tandem.kernels.operators import Operators
from tandem.kernels.reference import attention, linear, norm
from tandem.kernels.reference.activation import act_and_mul
from tandem.kernels.reference.cache import without_padding, write_kv
from tandem.kernels.reference.rope import apply_rotary
from tandem.kernels.scaled import TensorScaledKV

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
ROWS = pytest.mark.parametrize("rows", [0, 1, 19, 99])
BLOCK = 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_padding_is_not_cached() -> None:
    x = torch.arange(4.0).view(4, 1, 1)
    slots, rows = without_padding(torch.tensor([3, -1, 1, -1]), x)
    assert slots.tolist() == [3, 3, 1, 3] and rows.flatten().tolist() == [0, 0, 2, 0]
    slots, _ = without_padding(torch.tensor([-1, -1]), x[:2])
    assert slots.tolist() == [0, 0]
    assert not len(without_padding(torch.empty(0, dtype=torch.int64), x[:0])[0])


@DTYPES
@ROWS
def test_rms_norm_with_residual(rows: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    close(total, x.double() + residual.double())
    exact = total.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    close(normed, exact)


@DTYPES
@ROWS
def test_rotary_turns_pairs_of_halves(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 3, 8).to(dtype)
    angles = torch.rand(rows, 1, 4) * 100
    pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(
        torch.ones(()).double(), angles.double()
    )
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], -1)
    close(apply_rotary(x, (cos, sin)), torch.cat([pairs.real, pairs.imag], -1))


@DTYPES
@pytest.mark.parametrize("dim", [0, 4])
def test_dimensions_beyond_the_rotated_ones_are_unchanged(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(19, 3, 8).to(dtype)
    angles = torch.rand(19, 1, dim // 2) * 100
    cos_sin = angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], -1)
    result = apply_rotary(x, cos_sin)
    assert torch.equal(result[..., dim:], x[..., dim:])
    assert torch.equal(result[..., :dim], apply_rotary(x[..., :dim], cos_sin))


@DTYPES
@ROWS
def test_each_head_is_normed_with_its_own_gain(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    close(norm.head_rms_norm(x, weight, 1e-6), exact * weight.double())


def test_a_norm_of_a_row_is_the_same_in_any_batch() -> None:
    x, weight = torch.randn(9, 5, 192), torch.randn(192)
    x[3] = 0.0
    whole = norm.rms_norm(x, weight, 1e-6)
    assert whole[3].abs().max() == 0.0
    for row in range(9):
        assert torch.equal(norm.rms_norm(x[row, 2:3], weight, 1e-6), whole[row, 2:3])


@DTYPES
@ROWS
def test_silu_and_mul(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 38).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    close(act_and_mul(x, "silu"), gate * gate.sigmoid() * up)


@DTYPES
@ROWS
def test_gelu_and_mul(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 38).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    close(act_and_mul(x, "gelu_tanh"), 0.5 * gate * (1 + inner.tanh()) * up)


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    window: int | None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """One row and one head at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        end = start + row + 1
        first = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            keys, values = (side[first:end, head // group].double() for side in (k, v))
            scores = keys @ q[row, head].double() * q.shape[-1] ** -0.5
            if soft_cap is not None:
                scores = (scores / soft_cap).tanh() * soft_cap
            out[row, head] = scores.softmax(-1) @ values
    return out


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_paged_attention(
    dtype: torch.dtype, window: int | None, group: int, scattered: bool, soft_cap: float | None
) -> None:
    heads, dim, blocks = 2, 8, 200
    # Poisoned: a slot that was not written must not be read.
    keys, values = torch.full((2, heads, blocks * BLOCK, dim), torch.nan, dtype=dtype)
    free = torch.randperm(blocks).tolist() if scattered else list(range(blocks))
    q_parts, contexts, expected = [], [], []
    row = 0
    for start, count in [(0, 1), (0, 19), (30, 1), (5, 19), (98, 3), (0, 5)]:
        length = start + count
        table = [free.pop(0) for _ in range(-(-length // BLOCK))]
        k, v = torch.randn(2, length, heads, dim).to(dtype)
        slots = torch.tensor([table[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)])
        write_kv(keys, values, slots, k, v)
        q = torch.randn(count, heads * group, dim).to(dtype)
        q_parts.append(q)
        contexts.append(SequenceMetadata(slice(row, row + count), start, table, BLOCK))
        expected.append(exact_attention(q, k, v, start, window, soft_cap))
        row += count
    params = AttentionParams(dim**-0.5, window, soft_cap)
    result = attention.paged_attention(torch.cat(q_parts), keys, values, contexts, params)
    close(result, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_cache_is_attended_in_the_type_of_the_queries(dtype: torch.dtype) -> None:
    keys, values = torch.zeros(2, 2, 80, 8).to(torch.float8_e4m3fn)
    k, v = torch.randn(2, 30, 2, 8).to(dtype)
    table = [9, 2, 17, 4, 11, 0, 19, 7]
    slots = torch.tensor([table[t // BLOCK] * BLOCK + t % BLOCK for t in range(30)])
    write_kv(keys, values, slots, k, v)
    kv = [x.to(torch.float8_e4m3fn).to(dtype) for x in (k, v)]
    for start, count in ((29, 1), (11, 19), (0, 30)):
        q = torch.randn(count, 4, 8).to(dtype)
        context = SequenceMetadata(slice(0, count), start, table, BLOCK)
        result = attention.paged_attention(q, keys, values, [context], AttentionParams(8**-0.5))
        assert result.dtype == dtype
        close(result, exact_attention(q, kv[0], kv[1], start, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_of_fp8_have_a_scale_each(dtype: torch.dtype) -> None:
    """As vLLM has it: K and V are divided by their scales when they are written, and multiplied
    with them when they are read."""
    operators = Operators()
    empty, scales = torch.zeros(2, 2, 80, 8).to(torch.float8_e4m3fn), (0.013, 3.7e-4)
    keys, values = (TensorScaledKV(*each) for each in zip(empty, scales, strict=True))
    k, v = torch.randn(2, 30, 2, 8).to(dtype)
    v *= 0.1  # so that the largest are beyond 448 times the scale
    table = [9, 2, 17, 4, 11, 0, 19, 7]
    slots = torch.tensor([table[t // BLOCK] * BLOCK + t % BLOCK for t in range(30)])
    cos_sin = torch.ones(30, 1, 0), torch.zeros(30, 1, 0)
    rows = torch.cat([k, k, v], dim=1).to(dtype)
    operators.rope_and_cache_kv(rows, None, 1e-6, cos_sin, (keys, values), slots)
    codes = [
        (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        for x, scale in zip((k, v), scales, strict=True)
    ]
    assert (codes[1].float().abs() == 448).any()
    for side, each in zip((keys, values), codes, strict=True):
        actual = side.values.view(torch.uint8)[:, slots]
        assert torch.equal(actual, each.view(torch.uint8).transpose(0, 1))
    kv = [(x.float() * scale).to(dtype) for x, scale in zip(codes, scales, strict=True)]
    for start, count in ((29, 1), (11, 19), (0, 30)):
        q = torch.randn(count, 4, 8).to(dtype)
        sequences = [SequenceMetadata(slice(0, count), start, table, BLOCK)]
        metadata, params = AttentionMetadata(sequences, slots), AttentionParams(8**-0.5)
        result = operators.paged_attention(q, keys, values, metadata, params)
        assert result.dtype == dtype
        close(result, exact_attention(q, kv[0], kv[1], start, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_fp8_cannot_hold_becomes_its_largest_value(dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 1, 6, 1).to(torch.float8_e4m3fn)
    x = torch.tensor([447.0, 500.0, -6e4, torch.inf, torch.nan, 0.25]).to(dtype).view(6, 1, 1)
    write_kv(cache[0], cache[1], torch.arange(6), x, -x)
    expected = torch.tensor([448.0, 448.0, -448.0, 448.0, torch.nan, 0.25])
    torch.testing.assert_close(cache[0].float().view(-1), expected, equal_nan=True)
    torch.testing.assert_close(cache[1].float().view(-1), -expected, equal_nan=True)


def test_a_long_chunk_is_computed_in_tiles() -> None:
    keys, values = torch.randn(2, 1, 1200, 8)
    q = torch.randn(1101, 2, 8)
    context = SequenceMetadata(slice(0, 1101), 99, list(range(300)), BLOCK)
    result = attention.paged_attention(q, keys, values, [context], AttentionParams(8**-0.5))
    close(result, exact_attention(q, keys.transpose(0, 1), values.transpose(0, 1), 99, None))


@DTYPES
@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize(("start", "window"), [(0, None), (7, None), (30, 5)])
def test_the_ways_to_attend_on_a_gpu_agree_with_the_definition(
    dtype: torch.dtype, group: int, start: int, window: int | None
) -> None:
    """A CPU chooses none of them, but can run them."""
    q = torch.randn(19, 2 * group, 8).to(dtype)
    k, v = torch.randn(2, start + 19, 2, 8).to(dtype)
    context = SequenceMetadata(slice(0, 19), start, list(range(99)), BLOCK)
    mask = context.mask(start, 19, 0, window, q.device) if start else None
    arguments = q, k.transpose(0, 1), v.transpose(0, 1)
    expected = exact_attention(q, k, v, start, window)
    close(attention._sdpa_expanded(*arguments, mask, 8**-0.5, causal=True), expected)
    if window is None:
        close(attention._last_rows(*arguments, 8**-0.5), expected)


def test_consecutive_blocks_are_a_view() -> None:
    cache = torch.randn(2, 80, 8)
    context = SequenceMetadata(slice(0, 1), 9, [3, 4, 5, 11], BLOCK)
    view = context.gather(cache, 2, 10)
    assert view.data_ptr() == cache[0, 14].data_ptr()
    assert torch.equal(view, cache[:, 14:22])


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 99])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(37, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    offset = torch.randn(37).to(dtype) if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    with torch.inference_mode():
        close(linear.prepare_linear(weight, offset)(x), expected)


@pytest.mark.parametrize(
    ("packer", "dtype"),
    [
        (linear._blocked, torch.bfloat16),
        (linear._blocked, torch.float32),
        (linear._half, torch.bfloat16),
        (linear._half, torch.float16),
        (linear._upcast, torch.bfloat16),
        (linear._upcast, torch.float16),
    ],
)
@pytest.mark.parametrize("rows", [1, 7, 99])
@pytest.mark.parametrize("bias", [False, True])
def test_each_packing(packer: linear.Packer, rows: int, bias: bool, dtype: torch.dtype) -> None:
    if not linear.works(packer, dtype):
        pytest.skip("not on this CPU")
    weight, x = torch.randn(1037, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    offset = torch.randn(1037).to(dtype) if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    result = packer(weight, offset)(x)
    assert result.dtype == dtype
    close(result, expected)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_weights_beyond_fp16_are_not_squeezed_into_it(scale: float) -> None:
    weight, x = (torch.randn(64, 32) * scale).bfloat16(), torch.randn(3, 32).bfloat16()
    result = linear.prepare_linear(weight, None)(x)
    torch.testing.assert_close(
        result.float() / scale, x.float() @ (weight.float().T / scale), rtol=0.02, atol=0.1
    )
