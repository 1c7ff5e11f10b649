"""A layer's parts in one call: the bits of the operators that they are made of, in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionMetadata,
    AttentionParams,
    SequenceMetadata,
    decode_metadata,
)
from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.kernels.cpu import jit
from tandem.kernels.operators import joined
from tandem.kernels.reference.cache import write_kv
from tandem.kernels.signatures import (
    CosSin,
    FeedForward,
    LayerKV,
    LayerParts,
    Linear,
    OutputHead,
    Queries,
)
from tandem.tests.support.extent import selected
from tandem.tests.support.random_blocks import random_weight

jit.prepare()

from tandem.kernels.cpu import (  # noqa: E402
    decoding_layers,
    layer_parts,
)
from tandem.kernels.cpu.byte_products import PanelLinear  # noqa: E402
from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402

from .test_cpu_kernels import coded_kv, config_of, numbers_of  # noqa: E402
from .test_expert_layer import ROUTINGS  # noqa: E402
from .test_expert_layer import both as with_experts  # noqa: E402

pytestmark = pytest.mark.skipif(not jit.multiplies_bytes(), reason="the CPU has no AVX2")
HIDDEN, WIDTH, HEADS, KV_HEADS, DIM = 96, 160, 4, 2, 16
MAX_ROWS = 20
# The cache's dtype, and whether there are experts. Each pair is compiled, which takes five seconds;
# the feed-forward does not read the cache.
LAYERS = selected(
    [(torch.float32, False), (torch.float16, False), (torch.float32, True)],
    full=[(torch.float16, True)],
)
compiled = CompiledOperators()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def runs_of(inputs: int, *runs: tuple[str, int], biased: bool = False) -> list[Linear]:
    linears: list[Linear] = []
    for name, outputs in runs:
        kind = BLOCK_FORMATS[name]
        weight = random_weight(kind, outputs, inputs // kind.values)
        linears.append(PanelLinear(weight, torch.randn(outputs) if biased else None))
    return linears


def queries(*, head_norm: bool) -> tuple[Queries, Queries]:
    """In one call, and composed."""
    qkv = runs_of(HIDDEN, ("Q4_0", 5 * DIM), ("Q8_0", 3 * DIM), biased=True)
    weight = torch.randn(HEADS + KV_HEADS, DIM) if head_norm else None
    norm_weight = torch.randn(HIDDEN)

    def composed(x: torch.Tensor, cos_sin: CosSin, cache: LayerKV, slots: torch.Tensor) -> Any:
        qkv_TXD = joined(qkv)(compiled.rms_norm(x, norm_weight, 1e-5)).view(len(x), -1, DIM)
        return compiled.rope_and_cache_kv(qkv_TXD, weight, 1e-6, cos_sin, cache, slots)

    ours = compiled.prepare_queries(norm_weight, 1e-5, qkv, weight, 1e-6)
    assert ours is not None
    return ours, composed


def feed_forward() -> tuple[FeedForward, FeedForward]:
    """In one call, and composed."""
    o = runs_of(HEADS * DIM, ("Q5_0", HIDDEN))
    up = runs_of(HIDDEN, ("Q4_1", 2 * WIDTH))
    down = runs_of(WIDTH, ("Q8_0", 37), ("Q4_0", HIDDEN - 37))
    norm_weight = torch.randn(HIDDEN)

    def composed(attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        normed, x = compiled.add_rms_norm(joined(o)(attended), x, norm_weight, 1e-5)
        return x + joined(down)(compiled.act_and_mul(joined(up)(normed), "silu"))

    ours = compiled.prepare_feed_forward(o, norm_weight, 1e-5, up, down, "silu")
    assert ours is not None
    return ours, composed


def angles(rows: int) -> CosSin:
    turns = torch.rand(rows, 1, DIM // 2) * 100
    return turns.cos().repeat(1, 1, 2), torch.cat([-turns.sin(), turns.sin()], -1)


def empty_cache(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.zeros(2, KV_HEADS, 120, DIM, dtype=dtype)
    return keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5, MAX_ROWS])
def test_queries_are_those_of_the_operators(rows: int, head_norm: bool, dtype: torch.dtype) -> None:
    ours, reference = queries(head_norm=head_norm)
    x, cos_sin, slots = torch.randn(rows, HIDDEN), angles(rows), torch.randperm(120)[:rows]
    caches = empty_cache(dtype), empty_cache(dtype)
    result, expected = (
        each(x, cos_sin, cache, slots)
        for each, cache in zip((ours, reference), caches, strict=True)
    )
    assert result.shape == (rows, HEADS, DIM)
    assert torch.equal(result, expected)
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one, other) and one.any()


@pytest.mark.parametrize("rows", [1, 3, 5, MAX_ROWS])
def test_feed_forwards_are_those_of_the_operators(rows: int) -> None:
    ours, reference = feed_forward()
    attention_out, x = torch.randn(rows, HEADS * DIM), torch.randn(rows, HIDDEN)
    assert torch.equal(ours(attention_out, x), reference(attention_out, x))


def test_a_row_is_the_same_in_any_batch() -> None:
    cos_sin, slots = angles(MAX_ROWS), torch.arange(MAX_ROWS)
    project, _ = queries(head_norm=True)
    ours, _ = feed_forward()
    attention_out, x = torch.randn(MAX_ROWS, HEADS * DIM), torch.randn(MAX_ROWS, HIDDEN)
    out, q = ours(attention_out, x), project(x, cos_sin, empty_cache(torch.float32), slots)
    for first, end in ((0, 1), (1, 3), (3, 8), (2, MAX_ROWS)):
        some = slice(first, end)
        assert torch.equal(ours(attention_out[some], x[some]), out[some])
        turns = cos_sin[0][some], cos_sin[1][some]
        cache = empty_cache(torch.float32)
        assert torch.equal(project(x[some], turns, cache, slots[some]), q[some])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [3, MAX_ROWS])
def test_what_is_no_number_stays_visible_in_its_row_alone(rows: int, bad: float) -> None:
    cos_sin, slots = angles(rows), torch.arange(rows)
    project, _ = queries(head_norm=False)
    ours, _ = feed_forward()
    attention_out, x = torch.randn(rows, HEADS * DIM), torch.randn(rows, HIDDEN)
    clean = ours(attention_out, x), project(x, cos_sin, empty_cache(torch.float32), slots)
    x[1, 7] = bad
    result = ours(attention_out, x), project(x, cos_sin, empty_cache(torch.float32), slots)
    others = torch.arange(rows) != 1
    for before, after in zip(clean, result, strict=True):
        assert torch.equal(after[others], before[others])
        assert not after[1].isfinite().all()


def filled_cache(dtype: torch.dtype | str, kv: torch.Tensor) -> LayerKV:
    """A cache of these keys and values; of what ``coded_kv`` makes if ``dtype`` is a name."""
    if isinstance(dtype, torch.dtype):
        keys, values = kv.to(dtype, copy=True)
        return keys, values
    cache = coded_kv(dtype, tuple(kv.shape[1:]))
    write_kv(*cache, torch.arange(kv.shape[2]), *kv.transpose(1, 2))
    return cache


@pytest.mark.parametrize(("dtype", "experts"), LAYERS, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(scale=0.3),
        AttentionParams(scale=0.3, window=9, soft_cap=2.0, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 6])
def test_decoding_layers_are_those_of_the_operators(
    experts: bool, rows: int, params: AttentionParams, dtype: torch.dtype | str
) -> None:
    sinks = torch.randn(HEADS) if params.sinks else None
    others = replace(params, window=None, scale=0.5)
    layers = [
        LayerParts(queries(head_norm=True)[0], part, each, sinks)
        for each in (params, others, params)
        for part in [with_experts(ROUTINGS[2])[0] if experts else feed_forward()[0]]
    ]
    head = OutputHead(torch.randn(HIDDEN), 1e-6, runs_of(HIDDEN, ("Q8_0", 70), ("Q4_0", 3)))
    whole = compiled.prepare_decoding(layers)
    to_logits = compiled.prepare_decoding(layers, head)
    assert whole is not None and to_logits is not None
    x, cos_sin = torch.randn(rows, HIDDEN), angles(rows)
    # Sequences of 1 to 16 tokens in blocks of 4.
    sequences = [
        SequenceMetadata(slice(row, row + 1), row * 3, list(range(row * 5, row * 5 + 4)), 4)
        for row in range(rows)
    ]
    slots = torch.tensor([each.block_table[-1] * 4 + each.start % 4 for each in sequences])
    metadata = AttentionMetadata(sequences, slots, decode_metadata(sequences, x.device))
    assert metadata.decodes is not None
    for _ in range(2):  # other caches than before
        numbers = [torch.randn(2, KV_HEADS, 120, DIM) for _ in layers]
        ours, theirs = ([filled_cache(dtype, kv) for kv in numbers] for _ in range(2))
        inputs = x.clone()
        result = whole(inputs, cos_sin, ours, slots, metadata.decodes)
        expected = x
        for layer, cache in zip(layers, theirs, strict=True):
            q = layer.queries(expected, cos_sin, cache, slots)
            keys, values = cache
            attention_out = compiled.paged_attention(q, keys, values, metadata, layer.params, sinks)
            expected = layer.feed_forward(attention_out.view(rows, -1), expected)
        assert result is not None
        assert torch.equal(result, expected) and torch.equal(inputs, x)
        for one, other in zip(ours, theirs, strict=True):
            for left, right in zip(one, other, strict=True):
                assert torch.equal(numbers_of(left), numbers_of(right))
        normed = compiled.rms_norm(expected, head.norm_weight, head.eps)
        logits = torch.cat([each(normed) for each in head.runs], dim=1)
        again = to_logits(x, cos_sin, ours, slots, metadata.decodes)
        assert again is not None and torch.equal(again, logits)


@pytest.mark.parametrize("kind", ["scaled fp8", "int8"])
def test_decoding_layers_over_a_cache_in_eight_bits(kind: str) -> None:
    params = AttentionParams(scale=0.3, window=9)
    test_decoding_layers_are_those_of_the_operators(False, 6, params, kind)


def test_layers_of_different_kinds_are_not_decoded_in_one_call() -> None:
    def parts(feed_forward: FeedForward) -> LayerParts:
        return LayerParts(queries(head_norm=True)[0], feed_forward, AttentionParams(scale=1), None)

    dense, *mixtures = feed_forward()[0], *(with_experts(routing)[0] for routing in ROUTINGS)
    assert compiled.prepare_decoding([parts(mixtures[0]), parts(mixtures[0])]) is not None
    for pair in ((dense, mixtures[0]), mixtures[:2], mixtures[1:]):
        assert compiled.prepare_decoding([parts(each) for each in pair]) is None


def test_caches_of_different_shapes_are_left_to_the_operators() -> None:
    params = AttentionParams(scale=1.0)
    layers = [LayerParts(queries(head_norm=False)[0], feed_forward()[0], params, None)] * 2
    whole = compiled.prepare_decoding(layers)
    decodes = decode_metadata([SequenceMetadata(slice(0, 1), 0, [0], 4)], torch.device("cpu"))
    assert whole is not None and decodes is not None
    caches = [empty_cache(torch.float32), empty_cache(torch.bfloat16)]
    x, slots = torch.randn(1, HIDDEN), torch.arange(1)
    assert whole(x, angles(1), caches, slots, decodes) is None
    assert not any(each.any() for cache in caches for each in cache)


def test_no_step_waits_for_the_compiler() -> None:
    operators = CompiledOperators()
    feed_forward()
    operators.prepare_queries(
        torch.ones(HIDDEN), 1e-5, runs_of(HIDDEN, ("Q4_0", 3 * DIM)), None, 1e-5
    )
    assert operators.prepare_batched_decode(config_of(torch.bfloat16))
    kernels = [layer_parts.project, layer_parts.feed_forward, decoding_layers._decode_layers]
    before = [len(kernel.signatures) for kernel in kernels]
    test_queries_are_those_of_the_operators(MAX_ROWS, True, torch.bfloat16)
    test_feed_forwards_are_those_of_the_operators(1)
    params = AttentionParams(scale=0.3, window=9, soft_cap=2.0, sinks=True)
    test_decoding_layers_are_those_of_the_operators(False, 6, params, torch.bfloat16)
    assert [len(kernel.signatures) for kernel in kernels] == before
