"""KV in fp8 with scales: the sender converts to those of its receiver, which it greets with."""

from __future__ import annotations

import pytest
import torch

from tandem.shared.handoff.plane.messages import Received, SendFinished
from tandem.shared.kv.cache import KVCache
from tandem.shared.kv.layout import UNSCALED, WholeScales
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec
from tandem.tests.shared.handoff.support.plane_pair import HEADS, LAYERS, PlaneRank

LAYER = LayerSpec(
    attention=AttentionSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=16),
    mlp=DenseSpec(intermediate=16),
)
SPEC = DecoderSpec(
    vocab_size=8,
    hidden_size=32,
    layers=(LAYER,) * LAYERS,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_position=64,
)
TOKENS, SLOTS = 30, range(16, 46)
E4M3 = torch.float8_e4m3fn
FINE: WholeScales = ((0.25, 0.125), (0.5, 1.0), (0.0625, 0.25))
COARSE: WholeScales = ((0.1, 0.2), (0.3, 0.7), (0.9, 1.1))


def rank(name: str, dtype: torch.dtype, scales: WholeScales) -> tuple[PlaneRank, KVCache]:
    cache = KVCache(SPEC, num_blocks=8, block_size=8, dtype=dtype, whole_scales=scales)
    plane = PlaneRank(name, cache=cache, carrier="tcp")  # type: ignore[arg-type]
    return plane, cache


def numbers(cache: KVCache) -> list[torch.Tensor]:
    return [
        (each if isinstance(each, torch.Tensor) else each.dequantized())[:, SLOTS].float()
        for layer in cache.kv
        for each in layer
    ]


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ((E4M3, FINE), (E4M3, FINE)),
        ((E4M3, FINE), (E4M3, COARSE)),
        ((E4M3, FINE), (E4M3, UNSCALED)),
        ((E4M3, UNSCALED), (E4M3, FINE)),
        ((E4M3, FINE), (torch.bfloat16, UNSCALED)),
        ((torch.bfloat16, UNSCALED), (E4M3, FINE)),
        ((E4M3, FINE), (torch.int8, UNSCALED)),
    ],
    ids=str,
)
def test_kv_arrives_in_the_scales_of_the_receiver(
    there: tuple[torch.dtype, WholeScales], here: tuple[torch.dtype, WholeScales]
) -> None:
    (prefill, prefill_cache), (decode, decode_cache) = rank("p", *there), rank("d", *here)
    torch.manual_seed(0)
    for layer in prefill_cache.kv:
        for component in layer:
            values = torch.randn(component.shape)
            if isinstance(component, torch.Tensor):
                component.copy_(values)
            else:
                component.write(values)
    blocks, span = range(2, 6), {"first_token": 0, "end_token": TOKENS}
    with prefill, decode:
        decode.expect(prefill, 1, blocks, **span)
        prefill.open(decode, 1, blocks, dtype=decode_cache.kv_dtype, **span)
        prefill.compute(1, 0, TOKENS, chunk=11)
        prefill.log.wait(SendFinished, 1)
        decode.log.wait(Received, 1)
    scales = [scale for layer in here[1] or ((1.0, 1.0),) * LAYERS for scale in layer]
    for values, arrived, scale in zip(
        numbers(prefill_cache), numbers(decode_cache), scales, strict=True
    ):
        assert values.any()
        if here[0] == torch.int8:
            assert ((values - arrived).abs() <= values.abs().amax(-1, keepdim=True) / 253).all()
            continue
        # What a local prefill of these numbers would have written.
        expected = (values / scale).to(here[0]).float() * scale
        assert torch.equal(arrived, expected)
        assert here != there or torch.equal(arrived, values)
