"""GGUF files of random weights whose speed is a real model's: nothing is quantised or downloaded.

    python -m tandem.benchmarks.support.random_gguf FOLDER --vocabulary FILE

Blocks are random bits with constant scales: the speed of products does not depend on the values.
Tensors have the formats that llama.cpp's quantiser chooses. The tokenizer is copied from a GGUF
file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with tied embeddings; one of experts has ``ffn`` inner values in each of them."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    experts: int = 0
    chosen: int = 0


SHAPES = {
    "random-0.4B": Shape(
        architecture="qwen3", hidden=1024, layers=28, heads=16, kv_heads=8, ffn=3072
    ),
    "random-layers-of-8B": Shape(
        architecture="llama", hidden=4096, layers=4, heads=32, kv_heads=8, ffn=14336
    ),
    # Layers of Qwen3-30B-A3B.
    "random-experts": Shape(
        architecture="qwen3moe",
        hidden=2048,
        layers=4,
        heads=32,
        kv_heads=4,
        ffn=768,
        experts=128,
        chosen=8,
    ),
}
FILES = (
    *((name, kind) for name in list(SHAPES)[:2] for kind in ("Q4_0", "Q4_K_M", "Q8_0")),
    ("random-experts", "Q4_0"),
    ("random-0.4B", "BF16"),
)


def write_random_gguf(path: Path, shape: Shape, kind: str, vocabulary: Path | int) -> None:
    """Write a file of one of the kinds in ``FILES``, with the tokenizer of the file ``vocabulary``,
    or without a tokenizer if it is a number of tokens."""
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, shape.architecture)
    if isinstance(vocabulary, int):
        words = vocabulary
    else:
        words = _copy_tokenizer(GGUFReader(vocabulary), writer)
    _write_shape(writer, shape, words)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    for name, size in _tensors(shape, words):
        matrix = _matrix(size, _kind_of(name, shape, kind)) if len(size) > 1 else None
        if matrix is None:
            writer.add_tensor(name, np.ones(size, np.float32))
        else:
            data, stored = matrix
            writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def _copy_tokenizer(source: GGUFReader, writer: GGUFWriter) -> int:
    """Copy the tokenizer; returns the size of the vocabulary."""
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            nested = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=nested)
    return len(source.fields["tokenizer.ggml.tokens"].data)


def _write_shape(writer: GGUFWriter, shape: Shape, words: int) -> None:
    writer.add_vocab_size(words)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_feed_forward_length(shape.ffn)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.ffn)


def _tensors(shape: Shape, words: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, query = shape.hidden, shape.heads * shape.head_dim
    key, each = shape.kv_heads * shape.head_dim, (shape.experts,) if shape.experts else ()
    suffix = "_exps" if shape.experts else ""
    yield "token_embd.weight", (words, hidden)
    for layer in range(shape.layers):
        matrices: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (query, hidden),
            "attn_k": (key, hidden),
            "attn_v": (key, hidden),
            "attn_output": (hidden, query),
            "ffn_norm": (hidden,),
            f"ffn_gate{suffix}": (*each, shape.ffn, hidden),
            f"ffn_up{suffix}": (*each, shape.ffn, hidden),
            f"ffn_down{suffix}": (*each, hidden, shape.ffn),
        }
        if shape.experts:
            matrices["ffn_gate_inp"] = (shape.experts, hidden)
        if shape.architecture.startswith("qwen3"):
            matrices |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
        for name, size in matrices.items():
            yield f"blk.{layer}.{name}.weight", size
    yield "output_norm.weight", (hidden,)


def _kind_of(name: str, shape: Shape, kind: str) -> str:
    """The format that llama.cpp's quantiser chooses for a matrix in a file of this kind."""
    if "ffn_gate_inp" in name:
        return "F32"
    if name == "token_embd.weight":
        return kind if kind in ("BF16", "Q8_0") else "Q6_K"
    if kind != "Q4_K_M":
        return kind
    if "attn_v" in name or "ffn_down" in name:
        layer, eighth = int(name.split(".")[1]), shape.layers // 8
        more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        return "Q6_K" if more else "Q4_K"
    return "Q4_K"


def _matrix(size: tuple[int, ...], kind: str) -> tuple[np.ndarray, Kind]:
    """Random weights of about unit variance of a product's outputs, and their type."""
    random, stored, scale = np.random.default_rng(0), Kind[kind], size[-1] ** -0.5
    if kind == "F32":
        return random.standard_normal(size, np.float32) * np.float32(scale), stored
    values, nbytes = GGML_QUANT_SIZES[stored]
    shape = (*size[:-1], size[-1] // values * nbytes)
    data = np.frombuffer(random.bytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()
    _SCALED[kind](data.reshape(-1, nbytes), scale)
    return data, stored


def _scale_bfloat16(blocks: np.ndarray, scale: float) -> None:
    """Signs and fractions stay random."""
    exponent = int(np.float32(scale).view(np.int32)) >> 23
    words = blocks.reshape(-1).view(np.uint16)
    words[:] = words & 0x807F | exponent << 7


def _halves_at(*places: tuple[int, float]) -> Callable[[np.ndarray, float], None]:
    """Factors of a block, at these bytes: the scale divided by the spread of what they multiply."""

    def write(blocks: np.ndarray, scale: float) -> None:
        for at, spread in places:
            half = np.array([scale / spread], np.float16).view(np.uint8)
            blocks[:, at : at + 2] = half

    return write


_SCALED: dict[str, Callable[[np.ndarray, float], Any]] = {
    "BF16": _scale_bfloat16,
    "Q8_0": _halves_at((0, 74.0)),
    "Q4_0": _halves_at((0, 4.6)),
    # Scales and minimums have 6 bits, codes 4: a minimum of half the codes centres them.
    "Q4_K": _halves_at((0, 180.0), (2, 24.0)),
    "Q6_K": _halves_at((208, 1360.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocabulary", type=Path, required=True, help="a GGUF file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, kind in FILES:
        path = options.folder / f"{name}-{kind}.gguf"
        if not path.exists():
            write_random_gguf(path, SHAPES[name], kind, options.vocabulary)
        print(path)


if __name__ == "__main__":
    main()
