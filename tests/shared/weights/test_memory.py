"""The memory that weights take once they are loaded, and while they are."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.kernels.cpu import jit, scale_search
from tandem.kernels.cpu import operators as cpu_operators
from tandem.kernels.reference.linear import _half, prepare_linear, works
from tandem.shared.engine.device import operators_for
from tandem.shared.errors import ModelError
from tandem.shared.models.parallel import TensorParallel, WeightPlacement
from tandem.shared.weights import file_reads
from tandem.shared.weights.file_reads import FilePart
from tandem.shared.weights.footprint import parameter_sizes
from tandem.shared.weights.load import load_model
from tandem.shared.weights.memory import resident_bytes
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.kernels.test_byte_products import WIDER
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.checkpoints.quantized_folders import METHODS, write_quantized

SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
}
# Of what is not the weights', and of pieces that are quantised.
SLACK = 4 << 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "model"
    tiny_models.build("qwen3", folder, dtype="bfloat16", **SHAPE)
    return folder


@pytest.fixture(scope="module")
def q8_0(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(wide, tmp_path_factory.mktemp("gguf") / "model.gguf", "Q8_0")


@pytest.mark.skipif(not works(_half, torch.float16), reason="torch does not pack float16 here")
def test_weights_that_torch_packs_in_float16_are_counted() -> None:
    linear = prepare_linear(torch.ones(64, 32, dtype=torch.float16), None)
    assert resident_bytes([linear]) == 2 * 64 * 32


def logged_sizes(
    path: Path, caplog: pytest.LogCaptureFixture, **options: Any
) -> tuple[float, float]:
    """Megabytes in memory and of the formats, as the log has them."""
    with caplog.at_level(logging.INFO, "tandem.node"):
        load_model(path, operators=operators_for(torch.device("cpu"), **KERNELS), **options)
    line = next(each for each in caplog.messages if each.startswith("the weights take"))
    words = line.split()
    assert words[4] == words[-1] == "MB", line
    return float(words[3]), float(words[-2])


KERNELS = {"cpu_kernels": "compiled"}


@pytest.mark.parametrize("isq", [None, "q8_0", "q6k", "q4k"])
def test_the_size_of_the_weights_is_logged(
    wide: Path, caplog: pytest.LogCaptureFixture, isq: str | None
) -> None:
    """Beside what their formats say, which is what ``tandem info`` tells. Panels have some scales
    in more bits than the file."""
    sizes = parameter_sizes(open_source(wide), read_spec(wide), "bfloat16", isq=isq)
    wider = WIDER if jit.multiplies_bytes() else {}
    expected = sum(each.nbytes for each in sizes) / 1e6
    size_mb = sum(each.nbytes * (1 + wider.get(each.format, 0)) for each in sizes) / 1e6
    result, stated = logged_sizes(wide, caplog, isq=isq)
    assert stated == pytest.approx(expected, rel=0.02)
    # Blocks are taken apart where bytes are not multiplied.
    if isq is None or jit.multiplies_bytes():
        assert result == pytest.approx(size_mb, rel=0.02)
    assert isq is None or {each.format for each in sizes} & BLOCK_FORMATS.keys()


def test_threads_read_each_piece_of_a_tensor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reads, "_PIECE", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    begins: list[int] = []
    fill = file_reads._fill

    def noted(fd: int, begin: int, *rest: Any) -> None:
        begins.append(begin)
        fill(fd, begin, *rest)

    monkeypatch.setattr(file_reads, "_fill", noted)
    data = bytes(range(256)) * 4
    path = tmp_path / "file"
    path.write_bytes(data)
    for size, pieces in ((199, 1), (200, 2), (901, 10)):
        begins.clear()
        into = torch.zeros(size, dtype=torch.uint8)
        with file_reads.FileReads() as reads:
            reads.rows(path, 7, into, "numbers")
        assert into.numpy().tobytes() == data[7 : 7 + size]
        assert sorted(begins) == [7 + 100 * piece for piece in range(pieces)]


def test_a_tensor_is_not_read_further_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk may take seconds for each piece."""
    monkeypatch.setattr(file_reads, "_PIECE", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path, begins = tmp_path / "file", []
    path.touch()

    def failing(fd: int, begin: int, *_: Any) -> None:
        begins.append(begin)
        time.sleep(0.01 if begin else 0)
        raise ModelError(f"no bytes at {begin}")

    monkeypatch.setattr(file_reads, "_fill", failing)
    with pytest.raises(ModelError, match="no bytes at 0"), file_reads.FileReads() as reads:
        reads.rows(path, 0, torch.zeros(10_000, dtype=torch.uint8), "numbers")
    assert len(begins) < 50


def test_weights_without_a_kernel_are_named(
    wide: Path, q8_0: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (wide, q8_0):
        load_model(path, operators=operators_for(torch.device("cpu"), **KERNELS))
    load_model(wide)
    assert "decoded" not in caplog.text
    load_model(q8_0)
    assert caplog.messages[-1] == (
        "weights in Q8_0 are decoded for each product, which is slow; "
        "--cpu-kernels compiled has kernels for most formats, on CPUs with AVX2"
    )


def test_the_source_of_weights_is_not_among_them() -> None:
    """Parts keep their placement, which leads to it."""
    source = {"a file": torch.empty(1000)}

    def format_of(name: str) -> None:
        assert name not in source

    cpu = torch.device("cpu")
    place = WeightPlacement(torch.float32, cpu, TensorParallel(), format_of=format_of)
    assert resident_bytes([format_of, place, torch.empty(7)]) == 4 * 1007
    assert resident_bytes([place, torch.empty(7)]) == 4 * 7


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own counters")
@pytest.mark.parametrize("kind", ["plain", "GGUF", "isq"])
def test_the_peak_is_the_result_and_a_layer(
    wide: Path, q8_0: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's weights and their packed copies are held together."""
    path, isq = (q8_0 if kind == "GGUF" else wide), ("q4k" if kind == "isq" else None)
    operators = operators_for(torch.device("cpu"), **KERNELS)
    load_model(path, operators=operators, isq=isq)  # compiles
    samples = []

    def sampled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            samples.append(held())
            return result

        return call

    for name in ("prepare_linear", "prepare_quantized"):
        monkeypatch.setattr(type(operators), name, sampled(getattr(type(operators), name)))
    # A piece is quantised in fp32.
    search = replace(scale_search.COMPILED, with_minimum=sampled(scale_search.with_minimum))
    monkeypatch.setattr(cpu_operators, "COMPILED", search)
    model = load_model(path, operators=operators, isq=isq)
    above = max(samples) - held()
    sizes = parameter_sizes(open_source(path), read_spec(path), "bfloat16")
    layer = sum(each.nbytes for each in sizes if each.name.startswith("layers.0."))
    assert 0.4 * layer < above < layer + SLACK, (above, layer)
    del model


@pytest.mark.parametrize("kind", ["plain", "GGUF"])
def test_ranks_read_only_their_parts(
    wide: Path, q8_0: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both together read the file once, and norms twice. One rank alone also reads ahead."""
    ahead: list[FilePart] = []
    monkeypatch.setattr(file_reads.FileReads, "ahead", lambda _, parts: ahead.extend(parts))
    path, counts, fill = (q8_0 if kind == "GGUF" else wide), [], file_reads._fill

    def counted(descriptor: int, begin: int, data: memoryview, *names: Any) -> None:
        counts.append(len(data))
        fill(descriptor, begin, data, *names)

    monkeypatch.setattr(file_reads, "_fill", counted)
    for rank in range(2):
        load_model(path, tp=TensorParallel(rank, 2))
    assert not ahead
    sizes = parameter_sizes(open_source(path), read_spec(path), "bfloat16")
    assert sum(counts) == pytest.approx(sum(each.nbytes for each in sizes), rel=0.01)
    load_model(path)
    assert ahead


@pytest.mark.parametrize("kind", ["plain", "GGUF", "gptq 4"])
def test_each_tensor_is_read_ahead_once(
    wide: Path, q8_0: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In about the order of the reads, each of which makes room."""
    path = q8_0 if kind == "GGUF" else wide
    if kind in METHODS:
        path, _ = write_quantized(wide, tmp_path, METHODS[kind])
    ahead: list[FilePart] = []
    made: list[int] = []
    monkeypatch.setattr(file_reads.FileReads, "ahead", lambda _, parts: ahead.extend(parts))
    monkeypatch.setattr(file_reads.FileReads, "note_read", lambda _, nbytes: made.append(nbytes))
    load_model(path)
    # GPTQ's libraries add biases of zeros.
    stored = [each for each in open_source(path).stored() if not each.name.endswith(".bias")]
    parts = {FilePart(each.file, each.begin, each.begin + each.nbytes) for each in stored}
    assert sorted(ahead) == sorted(parts)
    names = [next(each.name for each in stored if each.begin == part.begin) for part in ahead]
    assert "embd" in names[0] or "embed" in names[0]
    assert "output" in names[-1] or "lm_head" in names[-1]
    layers = [int(part) for name in names for part in name.split(".") if part.isdigit()]
    assert layers == sorted(layers)
    assert sum(made) == pytest.approx(sum(each.nbytes for each in stored), rel=0.03)


def held() -> int:
    """Bytes of this process, without what glibc keeps of freed ones."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
