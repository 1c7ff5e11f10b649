"""What the families' configs can switch on or off, and odd numbers of heads, of their groups and of
experts, beyond the models of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.shared.models.spec import tensor_parallel_problem
from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.tiny_models import PARTIAL, YARN, YARN_MLA
from tandem.tests.support.ranks import check_on_ranks

PROMPT = torch.randint(0, 500, (41,), generator=torch.Generator().manual_seed(1)).tolist()
WHOLE = PARTIAL | {"partial_rotary_factor": 1.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
TIED = {"tie_word_embeddings": True}
ONE_KV = {"num_key_value_heads": 1}
ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
# Groups of three and of five; without a ``head_dim``, heads share the hidden size.
THREES = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 60}
FIVES = {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 60}
THREES_OF_HIDDEN = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72}
FIVES_OF_HIDDEN = {"num_attention_heads": 10, "num_key_value_heads": 2, "hidden_size": 120}
ODD_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FULL, SLIDING = "full_attention", "sliding_attention"
SWAPPED = {"layer_types": [FULL, SLIDING] * 2}
# A model of the table, and what its config has instead.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, odd sizes": (
        "llama_bias",
        ODD_HEADS | {"hidden_size": 60, "intermediate_size": 75, "vocab_size": 509},
    ),
    "llama, yarn with a factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama, yarn with weights": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "qwen2, windows in some layers": ("qwen2", SOME_WINDOWS | THREES_OF_HIDDEN),
    "qwen3, biases": ("qwen3", ODD_HEADS | SOME_WINDOWS | {"attention_bias": True}),
    "qwen3_moe, biases": (
        "qwen3_moe",
        ODD_EXPERTS | FIVES | {"num_experts": 5, "attention_bias": True},
    ),
    "qwen2_moe, no biases": (
        "qwen2_moe",
        {"qkv_bias": False, "norm_topk_prob": False, "decoder_sparse_step": 2, "num_experts": 5},
    ),
    "qwen2_moe, windows": (
        "qwen2_moe",
        SOME_WINDOWS | TIED | FIVES_OF_HIDDEN | {"mlp_only_layers": [1], "num_experts": 7},
    ),
    "mistral, no window": ("mistral", ODD_HEADS | {"sliding_window": None}),
    "mixtral, no window": ("mixtral", ODD_EXPERTS | FIVES | TIED | {"sliding_window": None}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "phi3, tied": (
        "phi3",
        TIED | THREES_OF_HIDDEN | {"rope_parameters": PARTIAL, "sliding_window": None},
    ),
    "gemma, one head of keys": (
        "gemma",
        ONE_KV
        | {"num_attention_heads": 5, "head_dim": 24, "hidden_size": 60, "intermediate_size": 95},
    ),
    "gemma2, no caps": (
        "gemma2",
        FIVES | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3, other kinds": ("gemma3", THREES | {"layer_types": [FULL, SLIDING, FULL]}),
    "glm, biases": ("glm", FIVES | {"attention_bias": True}),
    "glm, rotated whole": ("glm", ONE_KV | {"rope_parameters": WHOLE, "attention_bias": False}),
    "glm4, biases": ("glm4", THREES | {"attention_bias": True, "rope_parameters": WHOLE}),
    "glm4_moe, groups": (
        "glm4_moe",
        FIVES | {"use_qk_norm": False, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "glm4_moe, no biases": (
        "glm4_moe",
        THREES
        | {"n_routed_experts": 7}
        | {"attention_bias": False, "first_k_dense_replace": 2, "rope_parameters": WHOLE},
    ),
    "glm4_moe_lite, whole queries": (
        "glm4_moe_lite",
        {"q_lora_rank": None, "norm_topk_prob": False, "n_routed_experts": 7}
        | {"num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "glm4_moe_lite, yarn": ("glm4_moe_lite", {"rope_parameters": YARN_MLA}),
    "gpt_oss, other kinds": ("gpt_oss", SWAPPED | TIED | ODD_EXPERTS | THREES),
    "granite, biases": (
        "granite",
        TIED | THREES_OF_HIDDEN | {"attention_bias": True, "mlp_bias": True},
    ),
    "granite_moe, none shared": (
        "granite_moe",
        ODD_EXPERTS | FIVES_OF_HIDDEN | {"shared_intermediate_size": 0, "attention_bias": True},
    ),
    "olmo2, biases": ("olmo2", TIED | FIVES_OF_HIDDEN | {"attention_bias": True}),
    "olmo3, other kinds": ("olmo3", SWAPPED | THREES_OF_HIDDEN | {"attention_bias": True}),
    "seed_oss, other biases": (
        "seed_oss",
        TIED | FIVES | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4_5, biases": ("ernie4_5", THREES | {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe, every second layer": (
        "ernie4_5_moe",
        FIVES
        | {"moe_num_experts": 5, "moe_k": 2}
        | {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    ),
    "exaone4, other kinds": ("exaone4", SWAPPED | TIED | THREES_OF_HIDDEN),
    "hunyuan, biases": (
        "hunyuan",
        TIED | FIVES | {"attention_bias": True, "rope_parameters": DEFAULT},
    ),
    "ministral, other kinds": ("ministral", FIVES | {"layer_types": [SLIDING, FULL, SLIDING]}),
    "ministral3, growing queries": (
        "ministral3",
        TIED
        | THREES
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
    "phi, rotated whole": ("phi", THREES_OF_HIDDEN | {"rope_parameters": WHOLE}),
    "gpt_neox, no biases": (
        "gpt_neox",
        {
            "num_attention_heads": 6,
            "hidden_size": 84,
            "attention_bias": False,
            "rope_parameters": WHOLE,
        },
    ),
    "stablelm, norms": (
        "stablelm",
        THREES_OF_HIDDEN | {"qk_layernorm": True, "use_qkv_bias": False},
    ),
    "stablelm, parallel": (
        "stablelm",
        TIED | {"use_parallel_residual": True, "rope_parameters": WHOLE},
    ),
    "starcoder2, no biases": (
        "starcoder2",
        FIVES_OF_HIDDEN | {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "gpt2, another width": ("gpt2", {"n_head": 3, "n_inner": 81, "activation_function": "relu"}),
    "opt, another width": (
        "opt",
        {"num_attention_heads": 5, "hidden_size": 60, "word_embed_proj_dim": 60}
        | {"activation_function": "gelu", "ffn_dim": 85},
    ),
    "cohere, no norms": (
        "cohere",
        THREES_OF_HIDDEN | {"use_qk_norm": False, "attention_bias": True},
    ),
    "cohere2, other kinds": ("cohere2", SWAPPED | FIVES_OF_HIDDEN | {"attention_bias": True}),
    "gemma4, keys are values": (
        "gemma4",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4},
    ),
    "gemma4, other kinds": (
        "gemma4",
        THREES | {"layer_types": [FULL, SLIDING, SLIDING, FULL], "final_logit_softcapping": None},
    ),
    "gemma4_moe, inputs of layers": (
        "gemma4_moe",
        {"hidden_size_per_layer_input": 12, "num_experts": 5, "top_k_experts": 2},
    ),
    "minimax_m2, rotated whole": (
        "minimax_m2",
        ODD_EXPERTS | TIED | FIVES | {"rope_parameters": WHOLE},
    ),
    "smollm3, biases": (
        "smollm3",
        TIED
        | THREES_OF_HIDDEN
        | {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v2, one shared": (
        "deepseek_v2",
        {"q_lora_rank": 40, "topk_method": "greedy", "n_shared_experts": 1, "n_routed_experts": 7}
        | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 60}
        | {"rope_parameters": DEFAULT},
    ),
    "deepseek_v3, whole queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_parameters": DEFAULT, "norm_topk_prob": False}
        | {"n_routed_experts": 7, "num_attention_heads": 5, "num_key_value_heads": 5}
        | {"hidden_size": 60, "intermediate_size": 95, "moe_intermediate_size": 20}
        | {"n_group": 1, "topk_group": 1},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """On one rank, on as many as the heads allow, and handed over."""
    name, changes = VARIANTS[variant]
    model = tiny_models.build(name, tmp_path, **changes).eval()

    def expected(prompt: list[int], output: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([prompt + output]), use_cache=False).logits
        return logits[0, len(prompt) - 1 :]

    spec = read_spec(tmp_path)
    size = next(size for size in (2, 3, 5, 7) if tensor_parallel_problem(spec, size) is None)
    check_on_ranks(tmp_path, PROMPT, expected, size=size)
