"""Headers of GGUF files: every kind of file that is not whole is an error that names it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from tandem.shared.errors import ModelError
from tandem.shared.weights.gguf import header, hf_config
from tandem.shared.weights.gguf.header import GGUFHeader, TensorEntry, read_header, shortest
from tandem.shared.weights.gguf.hf_config import config_values
from tandem.shared.weights.gguf.tensor_types import TENSOR_TYPES
from tandem.shared.weights.load import load_model
from tandem.shared.weights.source import open_source
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.cached("llama_bias", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    return write_gguf(folder, folder / "whole.gguf").read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def start(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, begin: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, begin)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def refusal(tmp_path: Path, content: bytes) -> str:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


PADDING = bytes(256)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is truncated: the magic number ends at byte 4, and the file has 0"),
        (b"PK\x03\x04" + PADDING, "is not a GGUF file: it begins with b'PK"),
        (
            start(version=1) + PADDING,
            "it has version 1; supported: little-endian, versions 2 and 3",
        ),
        (b"GGUF" + struct.pack(">I", 3) + PADDING, "it is big-endian"),
        (start(tensors=1 << 62), "counts 4611686018427387904 tensors, more than it has room for"),
        (start(entries=1 << 62), "metadata entries, more than it has room for"),
        (start(entries=1 << 20) + PADDING, "more than it has room for"),
        (
            start(entries=1) + struct.pack("<Q", 1 << 60) + PADDING,
            "a metadata key of 1152921504606",
        ),
        (start(entries=1) + struct.pack("<Q", 60_000) + PADDING, "is truncated: a metadata key"),
        (start(entries=1) + struct.pack("<Q", 1) + b"\xff" + PADDING, "is not UTF-8"),
        (start(entries=1) + entry("a", 99, PADDING), "a is of the unknown type 99"),
        (
            start(entries=1) + entry("a", 9, struct.pack("<IQ", 9, 1) + PADDING),
            "a is a list of the unsupported type 9",
        ),
        (
            start(entries=1) + entry("a", 9, struct.pack("<IQ", 8, 1 << 40) + PADDING),
            "it counts 1099511627776 elements in a",
        ),
        (
            start(entries=1) + entry("a", 9, struct.pack("<IQ", 4, 1 << 20) + PADDING),
            "it counts 1048576 elements in a",
        ),
        (
            start(entries=1) + entry("a", 8, struct.pack("<Q", 1 << 40) + PADDING),
            "a of 1099511627776 bytes is longer than",
        ),
        (
            start(entries=2) + 2 * entry("a", 7, b"\1") + PADDING,
            "the metadata key 'a' is there twice",
        ),
        (
            start(entries=1) + entry("general.alignment", 4, struct.pack("<I", 24)) + PADDING,
            "general.alignment is 24, not a power of two",
        ),
        (
            start(entries=1) + entry("general.alignment", 4, struct.pack("<I", 0)) + PADDING,
            "general.alignment is 0",
        ),
        (start(tensors=1) + tensor(shape=()) + PADDING, "a has 0 dimensions, not 1 to 4"),
        (start(tensors=1) + tensor(shape=(1,) * 5) + PADDING, "a has 5 dimensions, not 1 to 4"),
        (start(tensors=1) + tensor(shape=(33, 2), kind=8) + PADDING, "rows are not blocks of 32"),
        (start(tensors=1) + tensor(shape=(0,)) + PADDING, "a has shape [0]"),
        (start(tensors=1) + tensor(begin=4) + PADDING, "begins at 4, not a multiple of 32"),
        (start(tensors=2) + 2 * tensor() + PADDING, "tensor a is there twice"),
        (start(tensors=2) + tensor() + tensor("b") + PADDING, "a and b overlap"),
        (
            start(tensors=2) + tensor("b", begin=32) + tensor(shape=(9,)) + PADDING,
            "a and b overlap",
        ),
        (start(tensors=1) + tensor("a\nb") + PADDING, r"a tensor's name is 'a\nb', with unpr"),
        (start(entries=1) + entry("a\x1b", 7, b"\1") + PADDING, r"a metadata key is 'a\x1b', with"),
        (start(tensors=1) + tensor(shape=(1 << 61, 1 << 61)) + PADDING, "is truncated: a ends at"),
        (start(tensors=1) + tensor(begin=1 << 63) + PADDING, "is truncated: a ends at byte"),
    ],
)
def test_a_file_that_is_not_whole_says_so(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refusal(tmp_path, content)


def test_a_header_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER", 1000)
    content = start(entries=1) + entry("a", 8, struct.pack("<Q", 2000) + bytes(2000))
    assert "its header is longer than 1000 bytes" in refusal(tmp_path, content)


def test_what_a_header_counts_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, content, reason in (
        ("MAX_ENTRIES", start(tensors=2) + tensor() + tensor("b"), "counts 2 tensors, of which 1"),
        ("MAX_ENTRIES", start(entries=2), "counts 2 metadata entries, of which 1 are supported"),
        (
            "MAX_ELEMENTS",
            start(entries=2)
            + entry("a", 9, struct.pack("<IQB", 0, 1, 7))
            + entry("b", 9, struct.pack("<IQB", 0, 1, 7)),
            "counts 1 elements in b, of which 0 are supported",
        ),
        (
            "MAX_MATRICES",
            start(tensors=1) + tensor(shape=(1, 1, 2)),
            "its tensors are 2 matrices; at most 1 are supported",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(header, limit, 1)
            assert reason in refusal(tmp_path, content + PADDING)


def test_a_file_cut_anywhere_is_truncated(tmp_path: Path, whole: bytes) -> None:
    for end in (0, 3, 4, 7, 8, 20, 24, 100, 2000, len(whole) // 2, len(whole) - 1):
        message = refusal(tmp_path, whole[:end])
        assert "truncated" in message or "more than it has room for" in message, end


def test_random_changes_never_raise_anything_else(tmp_path: Path, whole: bytes) -> None:
    """One changed byte of the header gives another header, or an error; nothing is allocated by
    what it claims."""
    file = tmp_path / "model.gguf"
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged_bytes = bytearray(whole[:30_000])
        damaged_bytes += bytes(len(whole) - len(damaged_bytes))
        damaged_bytes[generator.integers(0, 2000)] = generator.integers(0, 256)
        file.write_bytes(damaged_bytes)
        try:
            source = open_source(file)
            source.config()
            source.tokenizer_files()
        except ModelError:
            pass


def test_a_file_cut_while_it_is_read(tmp_path: Path, whole: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    source = open_source(file)
    name = source.names()[-1]
    with source:
        file.write_bytes(whole[:-32])
        with pytest.raises(ModelError, match=r"was truncated while .* was read"):
            source.read(name, 0, 0, source.shape(name)[0])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load_model(tmp_path / "absent.gguf")


Change = Callable[[gguf.GGUFWriter], None]


def error_after(folder: Path, tmp_path: Path, change: Change) -> str:
    file = write_gguf(folder, tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelError) as caught:
        load_model(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda w: w.add_uint32("split.count", 3),
            "has split.count 3, but is not named like a part",
        ),
        (
            lambda w: w.add_causal_attention(False),
            "attention.causal (is_causal in a config.json) is False; supported: True",
        ),
        (
            lambda w: w.add_pooling_type(gguf.PoolingType.RANK),
            "llama.pooling_type (pooling_type in a config.json) is 'rank'",
        ),
        (
            lambda w: w.add_float32("llama.rope.scale_linear", 4.0),
            "--ignore-config-keys llama.rope",
        ),
        (lambda w: w.add_value_length(8), "llama.attention.value_length is 8; supported: 16"),
        (lambda w: w.add_rope_dimension_count(8), "partial_rotary_factor is 0.5"),
        (
            lambda w: w.add_tensor("blk.0.extra.weight", np.ones(4, np.float32)),
            "extra.weight is unk",
        ),
        (
            lambda w: w.kv_data[0].pop("llama.block_count"),
            "llama.block_count (num_hidden_layers in a config.json) is missing; supported: a posi",
        ),
        (lambda w: w.add_block_count(0), "(num_hidden_layers in a config.json) is 0; supported"),
        (
            lambda w: w.add_block_count(4),
            "lacks blk.3.attn_norm.weight, blk.3.ffn_norm.weight, blk.3.attn_q.weight and 13 more",
        ),
        (lambda w: w.add_block_count(2), "has no place in this model"),
        (
            lambda w: w.add_embedding_length(32),
            "has shape [512, 64], but the configuration implies",
        ),
        (lambda w: w.tensors[0].pop("token_embd.weight"), "lacks token_embd.weight"),
        (lambda w: w.tensors[0].clear(), "has a vocabulary and no weights"),
        (
            lambda w: w.tensors[0].pop("blk.1.attn_q.weight"),
            "lacks blk.1.attn_q.weight: configuration and",
        ),
        (
            lambda w: w.add_string("general.architecture", "mamba"),
            "general.architecture is 'mamba'; supported: llama, qwen2",
        ),
    ],
)
def test_a_model_that_cannot_be_run_says_why(
    folder: Path, tmp_path: Path, change: Change, reason: str
) -> None:
    assert reason in error_after(folder, tmp_path, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_pooling_type(gguf.PoolingType.LAST),
        lambda w: w.add_pooling_type(gguf.PoolingType.MEAN),
        lambda w: w.add_causal_attention(True),
        lambda w: (w.add_expert_count(0), w.add_expert_used_count(0)),
    ],
)
def test_metadata_that_says_what_is_done_anyway(
    folder: Path, tmp_path: Path, change: Change
) -> None:
    assert load_model(write_gguf(folder, tmp_path / "model.gguf", change=change))


def of_metadata(tmp_path: Path, **metadata: str) -> str:
    """The refusal of a file with nothing but some texts."""
    entries = b"".join(entry(f"general.{key}", 8, text(value)) for key, value in metadata.items())
    file = tmp_path / "model.gguf"
    file.write_bytes(start(entries=len(metadata)) + entries + PADDING)
    with pytest.raises(ModelError) as caught:
        open_source(file).config()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"architecture": "clip"}, "'clip': it is the vision or audio part (mmproj) of a model"),
        ({"architecture": "clip", "type": "mmproj"}, "(mmproj)"),
        ({"architecture": "llama", "type": "adapter"}, "it is a LoRA adapter; merge it into"),
        ({"architecture": "nomic-bert"}, "it is an encoder, which embeds texts"),
        ({"architecture": "nomic-bert-moe"}, "it is an encoder, which embeds texts"),
        ({"architecture": "t5"}, "it is an encoder-decoder"),
        ({"architecture": "flux"}, "it is a diffusion model"),
        ({"architecture": "wavtokenizer-dec"}, "it is a model of audio"),
        ({"architecture": "eagle3"}, "it drafts tokens for another model"),
        ({"architecture": "deepseek"}, "supported: llama, qwen2"),
        ({"architecture": "llama"}, "has a vocabulary and no weights"),
        ({}, "general.architecture is missing; supported: llama"),
    ],
)
def test_a_file_of_another_kind_says_so(
    tmp_path: Path, metadata: dict[str, str], words: str
) -> None:
    assert words in of_metadata(tmp_path, **metadata)


def test_experts_under_the_name_of_a_dense_architecture(tmp_path: Path) -> None:
    metadata = {"general.architecture": "qwen2", "qwen2.expert_count": 8}
    with pytest.raises(ModelError) as caught:
        config_values(GGUFHeader(metadata, {}), lambda name: [], "file")
    assert str(caught.value) == (
        "file: qwen2.expert_count is 8: it is a mixture of experts under the name qwen2, which is "
        "not supported"
    )


def test_types_that_are_not_read_are_named_with_what_is(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    tensors = [
        tensor("a", kind=9),
        tensor("b", kind=24),
        tensor("c", kind=9),
        tensor("d", kind=777),
    ]
    for architecture, words in (
        ("llama", "a is of type Q8_1 and b is of type I8 and d is of type 777, which are not supp"),
        ("mamba", "general.architecture is 'mamba'"),  # no other file of it would do
    ):
        content = start(len(tensors), 1) + entry("general.architecture", 8, text(architecture))
        file.write_bytes(content + b"".join(tensors) + PADDING)
        with pytest.raises(ModelError) as caught:
            open_source(file).config()
        assert words in str(caught.value)
        lists_types = "use a file of the same model in one of these types: F32, " in str(
            caught.value
        )
        assert lists_types == (architecture == "llama")


def test_types_with_codebooks_need_the_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", others={"ffn_up": "IQ2_S"})
    with monkeypatch.context() as patch:
        patch.setattr(hf_config, "find_spec", lambda name: None)
        assert load_model(file)  # no row of this model is a block of 256
    tensors = {"a": TensorEntry("a", (2, 256), TENSOR_TYPES[22], file, 0)}
    for kind in (16, 17):
        name = TENSOR_TYPES[kind].name
        tensors[name] = replace(tensors["a"], name=name, type=TENSOR_TYPES[kind])
    header = GGUFHeader({}, tensors)
    hf_config.check_codebooks(header, "file")
    monkeypatch.setattr(hf_config, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        hf_config.check_codebooks(header, "file")
    assert str(caught.value) == (
        "file has tensors of type IQ2_S and IQ2_XS and IQ2_XXS, whose codebooks are in the package "
        "gguf: pip install '.[gguf]' in Tandem's checkout"
    )


def test_a_pointer_of_git_lfs_is_no_broken_file(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    assert "is a Git LFS pointer and not the file itself" in refusal(tmp_path, pointer)


def test_a_requested_format_must_be_that_of_the_file(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf")
    load_model(file, load_format="gguf")
    with pytest.raises(ModelError, match=r"--load-format safetensors, but .* is gguf"):
        load_model(file, load_format="safetensors")
    with pytest.raises(ModelError, match=r"--load-format gguf, but .* is safetensors"):
        load_model(folder, load_format="gguf")


def test_numbers_are_those_that_the_converter_was_given() -> None:
    for value in (1e-05, 1e-6, 0.1, 1.0, 500000.0, 123456.79, 1e30, 0.0, -2.5, float("inf")):
        single = struct.unpack("<f", struct.pack("<f", value))[0]
        assert shortest(single) == value
