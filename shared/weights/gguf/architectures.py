"""Architectures of GGUF files: the family of each, its metadata as keys of a ``config.json``, and
its tensors. No torch.

llama.cpp's converter stores tensors of some families otherwise than Hugging Face does: with the
rotated rows of q and k in pairs, norms with one added, experts of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...models.weight_names import Deinterleave, Split, WeightNames


@dataclass(frozen=True)
class Architecture:
    """``family`` as ``architectures`` of a config.json has it. ``keys`` are the config's names of
    metadata, without the prefix of the architecture, ``constants`` what the metadata leaves out."""

    family: str
    keys: Mapping[str, str]
    weights: WeightNames
    constants: Mapping[str, Any] = field(default_factory=dict)


_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_LOCAL = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def _in_layers(names: Mapping[str, str], kind: str = "weight") -> WeightNames:
    return {
        f"blk.{{i}}.{theirs}.{kind}": f"layers.{{i}}.{ours}.{kind}"
        for theirs, ours in names.items()
    }


def _interleaved(names: Mapping[str, str]) -> WeightNames:
    """Projections whose rotated rows are stored in pairs, with their biases."""
    return {
        f"blk.{{i}}.{theirs}.{kind}": Deinterleave(f"layers.{{i}}.{ours}.{kind}")
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    }


_QK = {"attn_q": "attention.q", "attn_k": "attention.k"}
_PROJECTIONS = _QK | {
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
_NORMS = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
_SANDWICH = _NORMS | {
    "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_mlp_norm",
}
_HEAD_NORMS = {"attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm"}
_DENSE: WeightNames = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
    # Factors of rope, which the config has from the file.
    "rope_freqs.weight": None,
    "rope_factors_long.weight": None,
    "rope_factors_short.weight": None,
    **_in_layers(_PROJECTIONS),
    **_in_layers(_PROJECTIONS, "bias"),
    **_in_layers(_NORMS),
}
_LLAMA = _DENSE | _interleaved(_QK)
_QWEN3 = _DENSE | _in_layers(_HEAD_NORMS)
_GEMMA = _DENSE | _in_layers(_SANDWICH)
_PHI3: WeightNames = _DENSE | {
    "blk.{i}.attn_qkv.weight": Split(
        tuple(f"layers.{{i}}.attention.{part}.weight" for part in "qkv")
    ),
    "blk.{i}.ffn_up.weight": Split(("layers.{i}.mlp.gate.weight", "layers.{i}.mlp.up.weight")),
}
_MOE: WeightNames = (
    _QWEN3
    | _in_layers({"ffn_gate_inp": "mlp.router"})
    | {
        f"blk.{{i}}.ffn_{part}_exps.{{j}}.weight": f"layers.{{i}}.mlp.experts.{{j}}.{part}.weight"
        for part in ("gate", "up", "down")
    }
)

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _KEYS, _LLAMA),
    "qwen2": Architecture("Qwen2ForCausalLM", _KEYS, _DENSE),
    "qwen3": Architecture("Qwen3ForCausalLM", _KEYS, _QWEN3),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", _KEYS | _EXPERTS, _MOE, {"norm_topk_prob": True}
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", _KEYS | _WINDOW | _SOFT_CAPS, _GEMMA),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _KEYS | _WINDOW | _SOFT_CAPS | _LOCAL,
        _GEMMA | _in_layers(_HEAD_NORMS),
    ),
    "phi3": Architecture("Phi3ForCausalLM", _KEYS | _WINDOW, _PHI3),
    "smollm3": Architecture("SmolLM3ForCausalLM", _KEYS, _LLAMA),
}
