"""What the families' configs can switch on or off, beyond the models of the table: logits of a
prompt and of three steps are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.shared.engine.plan import SequenceStep
from tandem.shared.models.batch import build_batch
from tandem.tests.shared.models.test_parity import BLOCK, consecutive
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.tiny_models import PARTIAL, YARN, YARN_MLA
from tandem.tests.support.runners import build_runner

LENGTH, STEPS = 41, 3
WHOLE = PARTIAL | {"partial_rotary_factor": 1.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
TIED = {"tie_word_embeddings": True}
ONE_KV = {"num_key_value_heads": 1}
ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
ODD_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FULL, SLIDING = "full_attention", "sliding_attention"
SWAPPED = {"layer_types": [FULL, SLIDING] * 2}
# A model of the table, and what its config has instead.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, odd sizes": (
        "llama_bias",
        ODD_HEADS | {"hidden_size": 60, "intermediate_size": 77, "vocab_size": 509},
    ),
    "llama, yarn with a factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama, yarn with weights": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "qwen2, windows in some layers": ("qwen2", SOME_WINDOWS | ONE_KV),
    "qwen3, biases": ("qwen3", ODD_HEADS | SOME_WINDOWS | {"attention_bias": True}),
    "qwen3_moe, biases": ("qwen3_moe", ODD_EXPERTS | {"num_experts": 5, "attention_bias": True}),
    "qwen2_moe, no biases": (
        "qwen2_moe",
        {"qkv_bias": False, "norm_topk_prob": False, "decoder_sparse_step": 2, "num_experts": 5},
    ),
    "qwen2_moe, windows": ("qwen2_moe", SOME_WINDOWS | TIED | {"mlp_only_layers": [1]}),
    "mistral, no window": ("mistral", ODD_HEADS | {"sliding_window": None}),
    "mixtral, no window": ("mixtral", ODD_EXPERTS | TIED | {"sliding_window": None}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "phi3, tied": ("phi3", TIED | ONE_KV | {"rope_parameters": PARTIAL, "sliding_window": None}),
    "gemma, one head of keys": ("gemma", ONE_KV | {"num_attention_heads": 5, "head_dim": 24}),
    "gemma2, no caps": (
        "gemma2",
        ONE_KV | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3, other kinds": ("gemma3", ONE_KV | {"layer_types": [FULL, SLIDING, FULL]}),
    "glm, biases": ("glm", {"attention_bias": True}),
    "glm, rotated whole": ("glm", ONE_KV | {"rope_parameters": WHOLE, "attention_bias": False}),
    "glm4, biases": ("glm4", {"attention_bias": True, "rope_parameters": WHOLE}),
    "glm4_moe, groups": (
        "glm4_moe",
        {"use_qk_norm": False, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "glm4_moe, no biases": (
        "glm4_moe",
        {"attention_bias": False, "first_k_dense_replace": 2, "rope_parameters": WHOLE},
    ),
    "glm4_moe_lite, whole queries": (
        "glm4_moe_lite",
        {"q_lora_rank": None, "norm_topk_prob": False},
    ),
    "glm4_moe_lite, yarn": ("glm4_moe_lite", {"rope_parameters": YARN_MLA}),
    "gpt_oss, other kinds": ("gpt_oss", SWAPPED | TIED | ODD_EXPERTS),
    "granite, biases": ("granite", TIED | ONE_KV | {"attention_bias": True, "mlp_bias": True}),
    "granite_moe, none shared": (
        "granite_moe",
        ODD_EXPERTS | {"shared_intermediate_size": 0, "attention_bias": True},
    ),
    "olmo2, biases": ("olmo2", TIED | ONE_KV | {"attention_bias": True}),
    "olmo3, other kinds": ("olmo3", SWAPPED | {"attention_bias": True}),
    "seed_oss, other biases": (
        "seed_oss",
        TIED | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe, every second layer": (
        "ernie4_5_moe",
        {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    ),
    "exaone4, other kinds": ("exaone4", SWAPPED | TIED | ONE_KV),
    "hunyuan, biases": ("hunyuan", TIED | {"attention_bias": True, "rope_parameters": DEFAULT}),
    "ministral, other kinds": ("ministral", {"layer_types": [SLIDING, FULL, SLIDING]}),
    "ministral3, growing queries": (
        "ministral3",
        TIED
        | {
            "rope_parameters": YARN
            | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"original_max_position_embeddings": 16}
        },
    ),
    "ministral3, as Devstral 2": (
        "ministral3",
        {
            "rope_parameters": YARN
            | {"llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 4.0}
        },
    ),
    "phi, rotated whole": ("phi", ONE_KV | {"rope_parameters": WHOLE}),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False, "rope_parameters": WHOLE}),
    "stablelm, norms": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": False}),
    "stablelm, parallel": (
        "stablelm",
        TIED | {"use_parallel_residual": True, "rope_parameters": WHOLE},
    ),
    "starcoder2, no biases": (
        "starcoder2",
        {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "gpt2, another width": ("gpt2", {"n_inner": 77, "activation_function": "relu"}),
    "opt, another width": ("opt", {"activation_function": "gelu", "ffn_dim": 77}),
    "cohere, no norms": ("cohere", ONE_KV | {"use_qk_norm": False, "attention_bias": True}),
    "cohere2, other kinds": ("cohere2", SWAPPED | ONE_KV | {"attention_bias": True}),
    "gemma4, keys are values": (
        "gemma4",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4},
    ),
    "gemma4, other kinds": (
        "gemma4",
        {"layer_types": [FULL, SLIDING, SLIDING, FULL], "final_logit_softcapping": None},
    ),
    "gemma4_moe, inputs of layers": ("gemma4_moe", {"hidden_size_per_layer_input": 12}),
    "minimax_m2, rotated whole": ("minimax_m2", ODD_EXPERTS | TIED | {"rope_parameters": WHOLE}),
    "smollm3, biases": (
        "smollm3",
        TIED | {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v2, one shared": (
        "deepseek_v2",
        {"q_lora_rank": 40, "topk_method": "greedy", "n_shared_experts": 1}
        | {"rope_parameters": DEFAULT},
    ),
    "deepseek_v3, whole queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_parameters": DEFAULT, "norm_topk_prob": False}
        | {"n_group": 1, "topk_group": 1},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    model = tiny_models.build(name, tmp_path, **changes)
    tokens = torch.randint(0, 500, (LENGTH + STEPS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model.eval()(tokens[None], use_cache=False).logits[0, LENGTH - 1 :]
    runner = build_runner(tmp_path, dtype="float32", block_size=BLOCK, num_blocks=20)
    table, start, given = consecutive(3, LENGTH + STEPS), 0, tokens[:LENGTH].tolist()
    for step in range(STEPS + 1):
        batch = build_batch(
            [SequenceStep(1, given, start, table, True)], BLOCK, runner.cache.device
        )
        with torch.inference_mode():
            logits = runner.model.logits(runner.model.forward(batch, runner.cache.kv))
        assert logits is not None
        torch.testing.assert_close(logits[0], expected[step], atol=1e-4, rtol=1e-4)
        start += len(given)
        given = tokens[start : start + 1].tolist()
