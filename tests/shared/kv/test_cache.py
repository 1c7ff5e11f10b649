"""Packing for a handoff and scattering, over block tables of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from tandem.kernels.reference.cache import write_cache
from tandem.shared.config.kv_dtypes import BYTES, SCALES
from tandem.shared.kv.cache import KVCache
from tandem.shared.kv.planning import bytes_per_block
from tandem.shared.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
)
from tandem.tests.support.packed_kv import packed_bytes

KV_HEADS, DIM, BLOCKS, BLOCK = 4, 6, 40, 5
SPEC = DecoderSpec(
    vocab_size=10,
    hidden_size=8,
    layers=tuple(
        LayerSpec(
            attention=AttentionSpec(num_heads=8, num_kv_heads=KV_HEADS, head_dim=DIM),
            mlp=DenseSpec(intermediate=8),
        )
        for _ in range(2)
    ),
    norm_eps=1e-6,
    tie_embeddings=True,
    max_position=1000,
)
LATENT = replace(
    SPEC,
    layers=(
        LayerSpec(
            attention=MLASpec(
                num_heads=8,
                q_lora_rank=None,
                kv_lora_rank=7,
                nope_dim=3,
                rope_dim=2,
                v_dim=5,
                softmax_scale=0.4,
                norm_eps=1e-6,
                rope_interleaved=True,
            ),
            mlp=DenseSpec(intermediate=8),
        ),
    )
    * 2,
)
SPECS = {"K and V": SPEC, "latent": LATENT}
TABLES = {
    "consecutive": list(range(3, 33)),
    "one gap": [*range(10), *range(15, 35)],
    "scattered": [(7 * i) % BLOCKS for i in range(30)],
}
SPANS = [(0, 1), (4, 6), (3, 19), (0, 99), (17, 150), (5, 5), (149, 150)]


def cache_of(
    dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK,
    spec: DecoderSpec = SPEC,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> KVCache:
    return KVCache(
        spec,
        num_blocks=BLOCKS,
        block_size=block_size,
        dtype=dtype,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def fill(cache: KVCache, scale: float = 1.0) -> None:
    for side in (side for layer in cache.layers for side in layer):
        random = torch.randn(side.shape) * scale
        side.copy_(random.clamp(-448, 448) if side.dtype == torch.float8_e4m3fn else random)


def values_of(cache: KVCache, table: list[int], first: int, end: int, layer: int = 1) -> Any:
    """Token by token, [side][head][token][dim]."""
    slots = [table[t // cache.block_size] * cache.block_size + t % cache.block_size
             for t in range(first, end)]  # fmt: skip
    return torch.stack([side[:, slots] for side in cache.layers[layer]]).contiguous()


def token_by_token(cache: KVCache, layer: int, table: list[int], first: int, end: int) -> bytes:
    if first == end:
        return b""
    return values_of(cache, table, first, end, layer).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pack_then_scatter_elsewhere(
    spec: DecoderSpec, table: list[int], span: tuple[int, int], dtype: torch.dtype
) -> None:
    cache, (first, end) = cache_of(dtype, spec=spec), span
    fill(cache)
    out = bytearray(b"\xff" * packed_bytes(cache, 1, end - first))
    cache.pack(1, table, first, end, out)
    assert bytes(out) == token_by_token(cache, 1, table, first, end)
    # The receiver has another block size, other blocks, and data that it may only read.
    elsewhere = [(11 * i + 2) % BLOCKS for i in range(25)]
    on_device = torch.tensor(list(out), dtype=torch.uint8)
    for data in (bytes(out), on_device):
        other = cache_of(dtype, block_size=7, spec=spec)
        other.scatter(1, elsewhere, first, end, data)
        assert token_by_token(other, 1, elsewhere, first, end) == bytes(out)
        count = sum(int(side.any(dim=-1).any(dim=0).sum()) for side in other.layers[1])
        assert count == len(other.layout[1].components) * (end - first)
        assert not any(side.any() for side in other.layers[0])


FORMATS = [getattr(torch, name) for name in BYTES if name not in SCALES]


@pytest.mark.parametrize("here", FORMATS, ids=str)
@pytest.mark.parametrize("there", FORMATS, ids=str)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_kv_is_packed_in_the_format_of_the_receiver(
    table: list[int], there: torch.dtype, here: torch.dtype
) -> None:
    """Rounded once, to what is nearest in that format; fp8 at its border rather than NaN."""
    cache = cache_of(there)
    fill(cache, scale=300 if here == torch.float8_e4m3fn else 1)
    out = bytearray(2 * KV_HEADS * 96 * DIM * here.itemsize)
    other = cache_of(here, block_size=7)
    cache.pack(1, table, 3, 99, out, None, other.kv_dtype)
    elsewhere = [(11 * i + 2) % BLOCKS for i in range(25)]
    other.scatter(1, elsewhere, 3, 99, bytes(out))
    source = values_of(cache, table, 3, 99).float()
    if here == torch.float8_e4m3fn:
        assert there == here or (source.abs() > 448).any()
        source = source.clamp(-448, 448)
    assert torch.equal(values_of(other, elsewhere, 3, 99).float(), source.to(here).float())


def layer_values(cache: KVCache, table: list[int], first: int, end: int) -> list[torch.Tensor]:
    """The second layer as models read it, token by token."""
    slots = [table[t // cache.block_size] * cache.block_size + t % cache.block_size
             for t in range(first, end)]  # fmt: skip
    return [
        (each if isinstance(each, torch.Tensor) else each.dequantized())[:, slots].float()
        for each in cache.kv[1]
    ]


@pytest.mark.parametrize("there", BYTES)
@pytest.mark.parametrize("here", BYTES)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_values_with_scales_and_without_arrive_in_the_dtype_of_the_receiver(
    spec: DecoderSpec, table: list[int], there: str, here: str
) -> None:
    cache = cache_of(getattr(torch, there), spec=spec)
    slots = torch.arange(BLOCKS * BLOCK)
    for component in (each for layer in cache.kv for each in layer):
        heads, number, dim = component.shape
        write_cache(component, slots, torch.randn(number, heads, dim))
    other = cache_of(getattr(torch, here), block_size=7, spec=spec)
    out = bytearray(packed_bytes(other, 1, 96))
    cache.pack(1, table, 3, 99, out, None, here)
    elsewhere = [(11 * i + 2) % BLOCKS for i in range(25)]
    other.scatter(1, elsewhere, 3, 99, bytes(out))
    for source, target in zip(
        layer_values(cache, table, 3, 99), layer_values(other, elsewhere, 3, 99), strict=True
    ):
        if here == "int8":
            # To the nearest of the 255 values that the largest one of a vector leaves.
            assert ((source - target).abs() <= source.abs().amax(-1, keepdim=True) / 253).all()
        else:
            assert torch.equal(target, source.to(getattr(torch, here)).float())


def test_scales_are_a_component_of_each_value() -> None:
    """They come first, and a slice of heads has those of its heads."""
    (layout, _), cache = cache_of(torch.int8).layout, cache_of(torch.int8)
    assert [(each.name, each.dim, each.dtype, each.scales) for each in layout.components] == [
        ("K scale", 1, "float32", "K"),
        ("V scale", 1, "float32", "V"),
        ("K", DIM, "int8", ""),
        ("V", DIM, "int8", ""),
    ]
    assert layout.head_bytes == 2 * (4 + DIM) and layout.shape == "K 6, V 6"
    assert layout.as_dtype("float32").components == cache_of().layout[0].components
    for number, (tensor, _) in enumerate(zip(cache.layers[0], layout.components, strict=True)):
        tensor.fill_(number + 1)
    out = bytearray(packed_bytes(cache, 0, 2, range(1, 3)))
    cache.pack(0, [1], 0, 2, out, range(1, 3))
    scales, values = torch.frombuffer(out[:32], dtype=torch.float32), out[32:]
    assert scales.tolist() == [1.0] * 4 + [2.0] * 4
    assert values == bytes([3] * 4 * DIM + [4] * 4 * DIM)


def test_two_ranks_fill_one_and_one_fills_two() -> None:
    """Unequal tensor-parallel sizes are ranges of heads."""
    whole, table = cache_of(), TABLES["scattered"]
    fill(whole)
    halves = [cache_of(tp_rank=rank, tp_size=2) for rank in range(2)]
    for half in halves:
        heads = half.layout[0].heads
        data = torch.empty(packed_bytes(whole, 0, 40, heads), dtype=torch.uint8)
        whole.pack(0, table, 2, 42, data, heads)
        half.scatter(0, table, 2, 42, data)
    again = cache_of()
    for half in halves:
        data = torch.empty(packed_bytes(half, 0, 40), dtype=torch.uint8)
        half.pack(0, table, 2, 42, data)
        again.scatter(0, table, 2, 42, data, half.layout[0].heads)
    assert token_by_token(again, 0, table, 2, 42) == token_by_token(whole, 0, table, 2, 42)


def test_a_latent_is_one_head_that_every_rank_holds_alone() -> None:
    """No rank has a part of it or an expansion to heads, and none keeps a V beside it."""
    whole, table = cache_of(spec=LATENT), TABLES["one gap"]
    fill(whole)
    nbytes = packed_bytes(whole, 0, 40)
    assert nbytes == 40 * (7 + 2) * 4
    for size in (2, 4):
        rank = cache_of(spec=LATENT, tp_rank=size - 1, tp_size=size)
        assert [layer.heads for layer in rank.layout] == [range(1)] * 2 and packed_bytes(
            rank, 0, 40
        ) == nbytes
        data = torch.empty(nbytes, dtype=torch.uint8)
        whole.pack(0, table, 2, 42, data, range(1))
        rank.scatter(0, table, 2, 42, data, range(1))
        assert token_by_token(rank, 0, table, 2, 42) == token_by_token(whole, 0, table, 2, 42)


def test_a_block_that_is_not_there_is_refused_and_nothing_is_copied() -> None:
    cache = cache_of()
    table = [(7 * i) % BLOCKS for i in range(29)] + [BLOCKS]
    data = bytearray(b"\1" * packed_bytes(cache, 0, 150))
    for move in (cache.pack, cache.scatter):
        with pytest.raises(IndexError, match=f"block {BLOCKS} of {BLOCKS}"):
            move(0, table, 0, 150, data)
    assert not cache.layers[0][0].any() and data[0] == 1


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="expected 384"):
        cache.pack(0, [1], 0, 2, bytearray(383))
    with pytest.raises(ValueError, match="not all on this rank"):
        cache_of(tp_rank=1, tp_size=2).pack(0, [1], 0, 1, bytearray(9), range(2))


@pytest.mark.parametrize(
    ("spec", "values"), [(SPEC, 2 * KV_HEADS * DIM), (LATENT, 7 + 2)], ids=SPECS
)
def test_bytes_per_block_is_what_the_tensors_take(spec: DecoderSpec, values: int) -> None:
    for size in (1, 2, 4, 8):
        cache = cache_of(torch.bfloat16, spec=spec, tp_rank=size - 1, tp_size=size)
        nbytes = sum(side.nbytes for layer in cache.layers for side in layer)
        assert nbytes == BLOCKS * bytes_per_block(spec, BLOCK, torch.bfloat16, size, size - 1)
    vectors = 2 * KV_HEADS if spec is SPEC else 1
    for name, width in BYTES.items():
        cache = cache_of(getattr(torch, name), spec=spec)
        nbytes = sum(side.nbytes for layer in cache.layers for side in layer)
        scales = BYTES[SCALES[name]] * vectors if name in SCALES else 0
        assert (
            nbytes
            == BLOCKS * bytes_per_block(spec, BLOCK, name)
            == 2 * BLOCKS * BLOCK * (width * values + scales)
        )


def test_an_unwritten_cache_takes_no_memory() -> None:
    process, blocks = psutil.Process(), 1 << 20
    before = process.memory_info().rss
    cache = KVCache(SPEC, num_blocks=blocks, block_size=BLOCK, dtype=torch.float32)
    size = sum(side.nbytes for layer in cache.layers for side in layer)
    assert size > 1 << 30
    assert process.memory_info().rss - before < size // 10
    assert not cache.layers[1][1][:, -BLOCK:].any()
