"""Configs as their authors published them, and what of them is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.handoff.wire.head_parts import HeadRun, parts_of
from tandem.shared.kv.layout import heads_by_rank
from tandem.shared.kv.planning import bytes_per_block
from tandem.shared.models import registry
from tandem.shared.models.config_files import ModelConfig
from tandem.shared.models.spec import (
    DecoderSpec,
    DenseSpec,
    KVSpec,
    MLASpec,
    MoESpec,
    RouterSpec,
    YarnScaling,
    fingerprint_fields,
    layers_before_routing,
    tensor_parallel_problem,
)

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "model_type": "deepseek_v3",
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}


def spec_of(base: dict[str, Any], **changes: Any) -> DecoderSpec:
    values = {**base, **changes}
    return registry.spec_of(ModelConfig(values))


def test_the_second_generation() -> None:
    spec = spec_of(V2_LITE)
    first, *others = spec.layers
    attention = first.attention
    assert isinstance(attention, MLASpec) and attention.q_lora_rank is None
    assert attention.kv == KVSpec(components=("latent",), heads=1, dim=512 + 64)
    # 192 ** -0.5 * (0.1 * 0.707 * ln(40) + 1) ** 2
    assert attention.softmax_scale == pytest.approx(0.114720, rel=1e-4)
    rope = first.rope
    assert rope is not None and isinstance(rope.scaling, YarnScaling)
    assert (rope.dim, rope.scaling.attention_factor) == (64, 1.0)
    assert first.mlp == DenseSpec(intermediate=10944)
    experts = MoESpec(
        router=RouterSpec(
            experts=64,
            top_k=6,
            scoring="softmax",
            groups=1,
            open_groups=1,
            group_best=1,
            correction=False,
            normalise=False,
            scale=1.0,
        ),
        expert=DenseSpec(intermediate=1408),
        shared=DenseSpec(intermediate=2816),
    )
    assert [layer.mlp for layer in others] == [experts] * 26


def test_the_third_generation() -> None:
    spec = spec_of(V3)
    assert [isinstance(layer.mlp, DenseSpec) for layer in spec.layers] == [True] * 3 + [False] * 58
    assert layers_before_routing(spec) == 4
    assert layers_before_routing(spec_of(V3, first_k_dense_replace=61)) == 61
    mlp = spec.layers[-1].mlp
    assert isinstance(mlp, MoESpec)
    assert mlp.router == RouterSpec(
        experts=256,
        top_k=8,
        scoring="sigmoid",
        groups=8,
        open_groups=4,
        group_best=2,
        correction=True,
        normalise=True,
        scale=2.5,
    )


def test_a_token_takes_a_latent_a_layer_on_every_rank() -> None:
    """And each rank gets it from one other, in turn."""
    spec = spec_of(V3)
    for size in (1, 2, 8):
        assert bytes_per_block(spec, 16, "bfloat16", size, size - 1) == 16 * 61 * 576 * 2
        assert heads_by_rank(spec, size) == [(range(1),) * 61] * size
        assert tensor_parallel_problem(spec, size) is None
    for receivers, senders in itertools.product((1, 2, 4), repeat=2):
        parts = parts_of(heads_by_rank(spec, receivers), heads_by_rank(spec, senders))
        assert [(part.receiver, part.heads) for part in parts] == [
            (rank, (HeadRun(61, 0, 1),)) for rank in range(receivers)
        ]
        assert len({part.sender for part in parts}) == min(receivers, senders)
    assert "128 query heads" in (tensor_parallel_problem(spec, 3) or "")
    odd = spec_of(V3, moe_intermediate_size=2049)
    assert "feed-forward width 2049" in (tensor_parallel_problem(odd, 2) or "")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_lora_rank": 256}, "attention.kv_lora_rank"),
        ({"q_lora_rank": 768}, "attention.q_lora_rank"),
        ({"v_head_dim": 64}, "attention.v_dim"),
        ({"rope_interleave": False}, "attention.rope_interleaved"),
        ({"num_experts_per_tok": 6}, "mlp.router"),
        ({"first_k_dense_replace": 2}, "mlp.router"),
        ({"n_shared_experts": 2}, "mlp.shared"),
    ],
    ids=str,
)
def test_a_fingerprint_names_what_differs(changes: dict[str, Any], field: str) -> None:
    one, other = fingerprint_fields(spec_of(V3)), fingerprint_fields(spec_of(V3, **changes))
    assert field in {name for name in one if one[name] != other[name]}


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (
            V3,
            {"quantization_config": {"quant_method": "quip"}},
            "quantization_config, method quip.* bfloat16",
        ),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; supported: 'noaux_tc'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (V3, {"n_group": 7}, "n_group is 7; supported: a divisor of 256"),
        (V3, {"n_group": 256}, "n_group is 256; supported: a divisor of 256 up to 128"),
        (V3, {"topk_group": 9}, "topk_group is 9; supported: up to 8"),
        (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; supported: up to 128"),
        (V3, {"attention_bias": True}, "attention_bias is True"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; supported: an even number"),
        (V3, {"head_dim": 128}, "head_dim is 128; supported: 64"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads is 8; supported: 128"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True; supported: False"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (V2_LITE, {"use_mtp": True}, "use_mtp"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(base, **changes)
