"""Checkpoints of random weights whose speed is a real model's: nothing is downloaded.

Random weights cost what trained ones do, and every token of the tokenizer is a word of text, so
that each generated token reaches the client by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder of Llama's or Qwen3's family with tied embeddings. In float32 unless ``dtype`` says
    otherwise: processors without AVX-512 multiply bfloat16 by converting it, many times slower."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    dtype: str = "float32"

    @property
    def query_norms(self) -> bool:
        """True if queries and keys are normalised before they are rotated."""
        return self.family == "qwen3"


QWEN3_42M = Shape(
    family="qwen3",
    vocab=32_000,
    hidden=512,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=1536,
)
# The shape of SmolLM2-135M.
LLAMA_135M = Shape(
    family="llama",
    vocab=49_152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
)
# 1.2 GB.
QWEN3_600M = Shape(
    family="qwen3",
    vocab=151_936,
    hidden=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=3072,
    dtype="bfloat16",
)
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def write_random_model(folder: Path, shape: Shape) -> int:
    """Config, weights and tokenizer in Hugging Face layout; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    weights = _weights(shape)
    save_file(weights, folder / "model.safetensors")
    write_tokenizer(folder, shape.vocab)
    return sum(weight.numel() for weight in weights.values())


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": shape.dtype,
    }


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    random, dtype = np.random.default_rng(0), getattr(torch, shape.dtype)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        numbers = random.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        return torch.from_numpy(numbers).to(dtype)

    hidden, query = shape.hidden, shape.heads * shape.head_dim
    key = shape.kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (shape.ffn, hidden),
        "mlp.up_proj": (shape.ffn, hidden),
        "mlp.down_proj": (hidden, shape.ffn),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.query_norms:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": matrix(*size) for name, size in matrices.items()}
        weights |= {
            f"{prefix}.{name}.weight": torch.ones(size, dtype=dtype) for name, size in norms.items()
        }
    return weights


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One whose tokens are words, each of its own."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocabulary - len(alphabet))]
    vocab = {piece: number for number, piece in enumerate([*words, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
