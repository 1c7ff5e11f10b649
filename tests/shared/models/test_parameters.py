"""The list of a decoder's parameters is that of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.shared.models.decoder import Decoder
from tandem.shared.models.layers.part import Part
from tandem.shared.models.parallel import TensorParallel, WeightPlacement
from tandem.shared.models.parameters import parameters_of
from tandem.shared.models.spec import (
    AttentionSpec,
    ClassifierLayer,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    NormKind,
    NormLayout,
    PositionBias,
    PositionTable,
    ProjectionSpec,
    QKNorm,
    RouterSpec,
    TokenInputs,
)

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4)
DENSE = DenseSpec(intermediate=8)
EXPERTS = MoESpec(router=RouterSpec(experts=3, top_k=1), expert=DENSE)
LAYER = LayerSpec(attention=ATTENTION, mlp=DENSE)
LATENT = MLASpec(
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=4,
    nope_dim=4,
    rope_dim=2,
    v_dim=4,
    softmax_scale=1.0,
    norm_eps=1e-6,
    rope_interleaved=True,
)
SPEC = DecoderSpec(
    vocab_size=8,
    hidden_size=8,
    layers=(LAYER, LAYER),
    norm_eps=1e-6,
    tie_embeddings=False,
    max_position=16,
)
ATTENTIONS: tuple[AttentionSpec | MLASpec, ...] = (
    LATENT,
    replace(LATENT, q_lora_rank=4),
    replace(ATTENTION, qkv_bias=True, o_bias=True, sinks=True),
    replace(ATTENTION, values_are_keys=True, v_norm=True, qkv_bias=True),
    *(replace(ATTENTION, qk_norm=norm) for norm in QKNorm),
    *(replace(ATTENTION, qk_norm=norm, kv_of=0) for norm in (None, QKNorm.HEAD)),
)
ROUTER = RouterSpec(experts=2, top_k=1, bias=True, correction=True, expert_scale=True)
FEED_FORWARDS: tuple[DenseSpec | MoESpec, ...] = (
    replace(DENSE, gated=False, bias=True),
    EXPERTS,
    replace(EXPERTS, router=replace(ROUTER, input_norm=True), expert=replace(DENSE, bias=True)),
    replace(EXPERTS, shared=DENSE, shared_gate=True),
    replace(EXPERTS, shared=DENSE, shared_norms=True),
)
CLASSIFIER = ClassifierSpec(labels=("a", "b"), activation="softmax", pooling="cls")
VARIANTS = (
    replace(SPEC, tie_embeddings=True, head_bias=True),
    replace(SPEC, head_bias=True, embedding_norm=True, norm=NormKind.LAYER),
    replace(SPEC, has_head=False, segments=2, positions=PositionTable(rows=16)),
    replace(SPEC, position_bias=PositionBias(heads=4, buckets=8, farthest=16)),
    replace(SPEC, projections=(ProjectionSpec(inputs=8, outputs=4),), norm=NormKind.LAYER_UNBIASED),
    replace(SPEC, token_inputs=TokenInputs(vocab_size=8, dim=4, activation="silu")),
    replace(SPEC, classifier=CLASSIFIER, has_head=False),
    replace(
        SPEC,
        classifier=replace(CLASSIFIER, bias=False, layer=ClassifierLayer(activation="tanh")),
        has_head=False,
    ),
    replace(
        SPEC,
        classifier=replace(
            CLASSIFIER, layer=ClassifierLayer(activation="gelu", bias=False, normed=True)
        ),
        has_head=False,
    ),
)
LAYERS = (
    *(replace(LAYER, norms=layout) for layout in NormLayout),
    *(replace(LAYER, attention=each) for each in ATTENTIONS),
    *(replace(LAYER, mlp=each) for each in FEED_FORWARDS),
    replace(LAYER, output_scale=True),
)
SPECS = (SPEC, *VARIANTS, *(replace(SPEC, layers=(LAYER, each)) for each in LAYERS))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("has_head", [True, False])
def test_the_list_is_that_of_the_parts(has_head: bool, ranks: int) -> None:
    """On the first of several ranks, too."""
    place = WeightPlacement(torch.float32, torch.device("meta"), TensorParallel(size=ranks))
    for spec in SPECS:
        slots: list[str] = []

        def note(part: Part, slots: list[str] = slots) -> None:
            slots.extend(part.weight_slots())

        Decoder(spec, place, note, has_head=has_head)
        assert sorted(parameters_of(spec, has_head=has_head)) == sorted(slots), spec
