"""Headers of GGUF files from strangers: a model, or one line that says what is wrong, and never
much more memory than their bytes."""

from __future__ import annotations

import math
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.errors import ModelError
from tandem.shared.models.registry import family_of, spec_of
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.weights.gguf.architectures import ARCHITECTURES
from tandem.shared.weights.gguf.header import GGUFHeader, TensorEntry, read_header
from tandem.shared.weights.gguf.tensor_types import TENSOR_TYPES
from tandem.shared.weights.source import open_source
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.fuzz import EXTREMES, FEWER, cheap, strange

COUNTS = st.integers(0, 3) | st.sampled_from(EXTREMES)
KINDS = st.integers(0, 13)
NAMES = st.sampled_from(["a", "b", "c", "general.alignment", "split.count", "", "x\n", "é" * 40])


def pack(form: str, *numbers: int) -> bytes:
    return struct.pack(f"<{form}", *numbers)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    data = draw(NAMES).encode()
    return pack("Q", draw(st.just(len(data)) | COUNTS)) + data


@st.composite
def values(draw: st.DrawFn) -> bytes:
    kind = draw(KINDS)
    if kind == 8:
        return pack("I", kind) + draw(texts())
    if kind == 9:
        of, count = draw(KINDS), draw(COUNTS)
        return pack("IIQ", kind, of, count) + draw(st.binary(max_size=40))
    return pack("I", kind) + draw(st.binary(min_size=1, max_size=8))


@st.composite
def tensors(draw: st.DrawFn) -> bytes:
    shape = draw(st.lists(st.sampled_from([1, 32, 256]) | COUNTS, max_size=5))
    kind = draw(st.sampled_from([*TENSOR_TYPES, 9, 99]))
    sizes = pack("I", len(shape)) + b"".join(pack("Q", size) for size in shape)
    begin = draw(st.sampled_from([0, 32, 64]) | COUNTS)
    return draw(texts()) + sizes + pack("IQ", kind, begin)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A header that is made as it should be, of numbers that may be anything."""
    metadata = [draw(texts()) + draw(values()) for _ in range(draw(st.integers(0, 3)))]
    entries = [draw(tensors()) for _ in range(draw(st.integers(0, 3)))]
    counts = draw(st.just((len(entries), len(metadata))) | st.tuples(COUNTS, COUNTS))
    start = b"GGUF" + pack("IQQ", draw(st.sampled_from([2, 3])), *counts)
    return start + b"".join(metadata + entries) + bytes(draw(st.integers(0, 300)))


def is_one_line(error: ModelError) -> bool:
    """True for one line of a bearable length."""
    return len(str(error)) < 2000 and all(each.isprintable() for each in str(error))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strange") / "model.gguf"


@given(data=strange(headers()))
def test_any_bytes_are_a_header_or_an_error(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with cheap():
        try:
            header = read_header(file)
        except ModelError as error:
            assert is_one_line(error), str(error)
            return
    assert all(each.begin + each.nbytes <= len(data) for each in header.tensors.values())


FAMILIES = (
    "llama_bias",
    "gemma4_moe",
    "phi3",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "olmo3",
    "glm4_moe",
)


@pytest.fixture(scope="module", params=FAMILIES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.cached(request.param, tmp_path_factory.mktemp("models"))
    return write_gguf(folder, folder / "whole.gguf", "Q8_0")


TOKENS = "tokenizer.ggml.tokens"
NUMBERS = st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 63, -0.5, 1e-45, 3e38, math.inf, math.nan])
VALUES = st.one_of(
    st.booleans(),
    NUMBERS,
    st.sampled_from(["", "none", "linear", "yarn", "llama", "\x1b[0m\n", "x" * 5000]),
    st.lists(st.sampled_from(["", "a", "b c", "Ġ"]), max_size=3),
    st.lists(st.booleans(), max_size=3),
    st.lists(st.integers(-5, 5), max_size=4).map(lambda values: array("i", values)),
    st.lists(st.floats(width=32), max_size=4).map(lambda values: array("f", values)),
)
SUFFIXES = (
    *{key for each in ARCHITECTURES.values() for key in each.keys},
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.dimension_count", "attention.value_length", "pooling_type", "attention.causal"),
    *("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"),
    *(
        "rope.dimension_count_swa",
        "attention.sliding_window_pattern",
        "rope.scaling.yarn_log_multiplier",
    ),
)


@st.composite
def changes(draw: st.DrawFn, header: GGUFHeader) -> GGUFHeader:
    """A header some of whose values are other ones, or missing."""
    architecture = header.metadata["general.architecture"]
    keys = st.sampled_from([*header.metadata]) | st.sampled_from(SUFFIXES).map(
        lambda suffix: f"{architecture}.{suffix}"
    )
    metadata = dict(header.metadata)
    if draw(st.integers(0, 3)) == 0:
        metadata["tokenizer.ggml.model"] = draw(st.sampled_from(["llama", "gemma4", "bert", "t5"]))
        metadata["tokenizer.ggml.scores"] = array("f", [0.0] * len(header.metadata[TOKENS]))
    for key in draw(st.lists(keys, min_size=1, max_size=3)):
        if draw(st.integers(0, 4)) == 0:
            metadata.pop(key, None)
        else:
            metadata[key] = draw(VALUES)
    tensors = dict(header.tensors)
    for name in draw(st.lists(st.sampled_from([*tensors, "rope_freqs.weight"]), max_size=2)):
        old = tensors.pop(name, None)
        shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        if old is not None and draw(st.booleans()):
            tensors[name] = TensorEntry(name, tuple(shape), TENSOR_TYPES[0], old.file, old.begin)
    return GGUFHeader(metadata, tensors)


def everything(file: Path, header: GGUFHeader) -> None:
    """All that is read from a header before the weights are."""
    source: Any = open_source(file)
    source.header = header
    for ask in (
        lambda: Tokenizer.load(source.tokenizer_files()),
        source.end_tokens,
        source.names,
        source.block_formats,
    ):
        try:
            ask()
        except ModelError as error:
            assert is_one_line(error), str(error)
    config = source.config()
    spec_of(config, frozenset(), None)
    source.weight_names(family_of(config.values, config.file))


@FEWER
@given(data=st.data())
def test_any_values_are_a_model_or_an_error(whole: Path, data: st.DataObject) -> None:
    header = data.draw(changes(read_header(whole)))
    try:
        everything(whole, header)
    except ModelError as error:
        assert is_one_line(error), str(error)
