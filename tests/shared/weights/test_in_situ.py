"""Weights that are quantised while they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.block_formats import BLOCK_FORMATS, Q8_0
from tandem.shared.config import EngineConfig
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.errors import ModelError
from tandem.shared.models.layers.linear_method import QuantizedMethod
from tandem.shared.weights.footprint import parameter_sizes
from tandem.shared.weights.in_situ import InSitu
from tandem.shared.weights.load import load_model
from tandem.shared.weights.obtain import obtain_model
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.shared.models.test_kv_formats import ratios
from tandem.tests.shared.weights.gguf.test_models import NEW
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.checkpoints.quantized_folders import METHODS, write_quantized
from tandem.tests.support.ranks import build_ranks
from tandem.tests.support.runners import build_runner

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
KINDS = ("q2k", "q3k", "q4k", "q5k", "q6k", "q8_0", "q4_0", "int8", "fp8")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "model"
    tiny_models.build("qwen3", folder, num_hidden_layers=2, **WIDE)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_linears_and_tables_are_quantised(wide: Path, kind: str) -> None:
    spec = read_spec(wide)
    sizes = {
        each.name: each.format
        for each in parameter_sizes(open_source(wide), spec, "float32", isq=kind)
    }
    whole = "FP8" if kind == "fp8" else {"int8": "Q8_0"}.get(kind, kind.upper().replace("K", "_K"))
    head = whole if whole in ("FP8", "Q8_0") else "Q6_K"
    assert sizes["layers.1.mlp.down.weight"] == sizes["embed.weight"] == whole
    assert sizes["head.weight"] == head
    # Of heads, half as wide as a block.
    assert sizes["layers.0.attention.o.weight"] == (whole if whole in ("FP8", "Q4_0") else "Q8_0")
    assert sizes["layers.0.attention_norm.weight"] == "float32"


# Fused, separate, stacked and alternating matrices, and latents; two ranks have whole blocks.
MIXED: dict[str, dict[str, Any]] = {
    "phi3": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "granite_moe": {"intermediate_size": 64, "shared_intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
    "deepseek_v3": NEW["deepseek_v3"]
    | {"moe_intermediate_size": 64, "q_lora_rank": 64, "v_head_dim": 32},
}


@pytest.mark.parametrize("family", MIXED)
def test_fused_and_stacked_tensors_are_as_in_a_quantised_file(family: str, tmp_path: Path) -> None:
    """On one rank and on two. Routers stay numbers, and so does what expands latents."""
    folder = tmp_path / "model"
    tiny_models.build(family, folder, **MIXED[family])
    spec = read_spec(folder)
    formats = {
        each.name: each.format
        for each in parameter_sizes(open_source(folder), spec, "float32", isq="q8_0")
    }
    for name, format in formats.items():
        if "router" in name or "norm" in name or "kv_b" in name or name.endswith("bias"):
            assert format != "Q8_0", name
    kept = {f"attn_{part}_b": "F32" for part in ("k", "v")}
    file = write_gguf(folder, tmp_path / "model.gguf", "Q8_0", others=kept)
    for size in (1, 2):
        result, expected = (
            build_ranks(path, size, isq=isq).logits([list(range(40))], 0, list(range(10)))
            for path, isq in ((folder, "q8_0"), (file, None))
        )
        assert torch.equal(result, expected)


@pytest.mark.parametrize("kind", ["q8_0", "q4k"])
def test_inputs_of_layers_are_quantised(tmp_path: Path, kind: str) -> None:
    """The larger part of Gemma 4's small models: their table and its projection take the memory of
    a file in the same format, and have its values."""
    folder = tmp_path / "model"
    tiny_models.build("gemma4", folder, hidden_size=256, hidden_size_per_layer_input=64)
    whole = kind.upper().replace("K", "_K")
    sizes = {
        each.name: each
        for each in parameter_sizes(open_source(folder), read_spec(folder), "bfloat16", isq=kind)
    }
    for name in ("table", "projection"):
        size = sizes[f"token_inputs.{name}.weight"]
        assert size.format == whole
        assert size.nbytes == BLOCK_FORMATS[whole].bytes_of(size.values)
    tokens, x = torch.arange(512), torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    results = []
    for path, isq in ((folder, None), (folder, kind), (tmp_path / "m.gguf", None)):
        if path.suffix:
            write_gguf(folder, path, "Q8_0")
        inputs = load_model(path, isq=isq).token_inputs
        assert inputs is not None
        results.append((inputs.table.embed(tokens), inputs(tokens, x)))
    for plain, result, file in zip(*results, strict=True):
        error = float((result - plain).norm() / plain.norm())
        assert 0 < error < {"q8_0": 0.01, "q4k": 0.1}[kind]
        if kind == "q8_0":
            assert torch.equal(result, file)


def test_ranks_have_the_parts_of_one(wide: Path) -> None:
    one, two = (build_ranks(wide, size, isq="q4k") for size in (1, 2))
    for rank in two.runners:
        layer: Any = rank.model.layers[0]
        assert isinstance(layer.mlp.down.method, QuantizedMethod)
    parts, table = [list(range(30)), [7], [9]], list(range(10))
    expected = one.logits(parts, 0, table)
    torch.testing.assert_close(two.logits(parts, 0, table), expected, atol=1e-4, rtol=1e-4)


def test_rows_of_no_whole_blocks(tmp_path: Path) -> None:
    in_situ = InSitu("q4k", read_spec(tiny_models.cached("llama", tmp_path)))
    assert in_situ.format_of("layers.0.mlp.down.weight", 96) == Q8_0
    assert in_situ.format_of("layers.0.mlp.down.weight", 100) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_canary_allows_for_one_side_that_is_quantised(
    deep: Path, senders: tuple[ModelRunner, ModelRunner], kind: str
) -> None:
    quantised = build_runner(deep, dtype="bfloat16", block_size=4, num_blocks=24, isq=kind)
    same, other = ratios(senders, quantised, InSitu(kind, read_spec(deep)).names())
    assert same < 1 < other


def test_the_canary_allows_for_deep_llamas_in_four_bits(tmp_path: Path) -> None:
    """K without norms differs most: by 1.25 of a layer's largest value in this one."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16}
    for seed in range(2):
        tiny_models.build("llama", tmp_path / f"{seed}", seed=seed, dtype="bfloat16", **size)
    senders = [
        build_runner(tmp_path / f"{seed}", dtype="float32", block_size=8, num_blocks=24)
        for seed in range(2)
    ]
    quantised = build_runner(
        tmp_path / "0", dtype="float32", block_size=4, num_blocks=24, isq="q4_0"
    )
    same, other = ratios(senders, quantised, ["Q4_0"])
    assert same < 1 < other


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.cached("qwen3", tmp_path)
    quantized, _ = write_quantized(folder, tmp_path / "made", METHODS["fp8 tensor"])
    file = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    for path in (quantized, file):
        with pytest.raises(ModelError, match=r"--isq q4k: .* quantised already; leave it out, or"):
            obtain_model(EngineConfig(model=str(path), isq="q4k"))
    with pytest.raises(ModelError, match="random weights are not quantised"):
        obtain_model(EngineConfig(model=str(folder), isq="q4k", load_format="dummy"))
    assert obtain_model(EngineConfig(model=str(folder), isq="q4k")).spec.dtype == "quantized"
