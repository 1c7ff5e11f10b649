"""GGUF files of random blocks, which take as long to load as a real model's: nothing is
downloaded, and nothing quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tandem.kernels.block_formats import BLOCK_FORMATS, BlockFormat
from tandem.tests.benchmarks.support.random_model import Shape
from tandem.tests.support.random_blocks import random_weight

FormatOf = Callable[[str, int], str]


def q8_0(name: str, layer: int) -> str:
    """Every matrix in Q8_0."""
    return "Q8_0"


def q4_k_m(name: str, layer: int) -> str:
    """The mix of llama.cpp's Q4_K_M: values and the last matrix in Q6_K in every second layer."""
    wide = name == "token_embd" or (name in ("attn_v", "ffn_down") and layer % 2 == 0)
    return "Q6_K" if wide else "Q4_K"


def write_random_gguf(file: Path, shape: Shape, format_of: FormatOf) -> None:
    """A model of Qwen3's family without a tokenizer, its matrices in the formats of their names
    and layers."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.vocab)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "attn_q": (query, shape.hidden),
        "attn_k": (key, shape.hidden),
        "attn_v": (key, shape.hidden),
        "attn_output": (shape.hidden, query),
        "ffn_gate": (shape.ffn, shape.hidden),
        "ffn_up": (shape.ffn, shape.hidden),
        "ffn_down": (shape.hidden, shape.ffn),
    }
    norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    made: dict[tuple[BlockFormat, tuple[int, int]], np.ndarray] = {}

    def add(name: str, size: tuple[int, int], layer: int = 0) -> None:
        kind = BLOCK_FORMATS[format_of(name.rpartition(".")[2], layer)]
        if (kind, size) not in made:  # the same bytes in every layer
            made[kind, size] = random_weight(kind, size[0], size[1] // kind.values).blocks.numpy()
        raw = gguf.GGMLQuantizationType[kind.name]
        writer.add_tensor(f"{name}.weight", made[kind, size], raw_dtype=raw)

    add("token_embd", (shape.vocab, shape.hidden))
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(shape.layers):
        for name, size in matrices.items():
            add(f"blk.{layer}.{name}", size, layer)
        for name, width in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
