"""GGUF files against transformers with the dequantised weights: specs, logits, tensor types."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.kernels.cpu import jit
from tandem.kernels.operators import Operators
from tandem.kernels.reference.linear import multiplies
from tandem.shared.engine.plan import SequenceStep
from tandem.shared.models.layers.linear_method import DenseMethod, QuantizedMethod
from tandem.shared.models.registry import spec_of
from tandem.shared.models.spec import YarnScaling
from tandem.shared.weights.load import load_model
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import gguf_files, tiny_models
from tandem.tests.support.checkpoints.gguf_files import dequantised, in_numbers, write_gguf
from tandem.tests.support.ranks import build_ranks, check_on_ranks
from tandem.tests.support.rounded_operators import RoundedOperators
from tandem.tests.support.runners import build_runner

TYPES = ("F32", "F16", "BF16", *sorted(BLOCK_FORMATS))
FAMILIES = (
    "llama",
    "llama_bias",
    "llama_linear",
    "llama_yarn",
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gemma3_linear",
    "phi3",
    "phi3_short",
    "smollm3",
)
PROMPT = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(1)).tolist()
# What a file leaves out, and readers know.
KNOWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    "gemma3_linear": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    "smollm3": {"no_rope_layer_interval": 4},
}
# Families that are tested unquantised, and where a tiny checkpoint differs from all published ones.
_YARN_OF_LATENT = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
NEW: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": {"rope_parameters": _YARN_OF_LATENT},
    "deepseek_v2_groups": {},
    "deepseek_v3": {"rope_parameters": _YARN_OF_LATENT},
    "glm4_moe_lite": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "gemma": {},
    "gemma4": {},
    "gemma4_shared": {},
    "gemma4_moe": {},
    "glm": {"head_dim": 16},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_neox": {"num_key_value_heads": 8},
    "gpt_neox_serial": {"num_key_value_heads": 8},
    "gpt_oss": {},
    "granite": {},
    "granite_moe": {},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "minimax_m2": {},
    "ministral3": {
        "rope_parameters": _YARN_OF_LATENT
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    },
    "mixtral": {"sliding_window": None},
    "olmo2": {},
    "olmo3": {},
    "phi": {"num_key_value_heads": 8},
    "qwen2_moe": {"norm_topk_prob": False},
    "seed_oss": {},
    "stablelm": {},
    "stablelm_parallel": {},
    "starcoder2": {"sliding_window": None},
}
WIDE_EXPERTS: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 1,
}
LLAMA3 = tiny_models.MODELS["llama"][1]["rope_parameters"]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def checkpoint(root: Path, name: str, **changes: Any) -> Path:
    folder = root / f"{name}-{len(changes)}"
    if not folder.exists():
        tiny_models.build(name, folder, **(KNOWN.get(name, {}) | changes))
    return folder


def compiled_operators() -> Operators:
    jit.prepare()
    from tandem.kernels.cpu.operators import CompiledOperators

    return CompiledOperators()


def logits_of(model: Path, prompt: list[int], operators: Operators | None = None) -> torch.Tensor:
    """The logits of the last of the prompt's tokens, computed in two steps."""
    runner = build_runner(
        model,
        dtype="float32",
        kv_dtype="float32",
        block_size=4,
        num_blocks=40,
        operators=operators,
    )
    table = list(range(40))
    logits = None
    for tokens, start in ((prompt[:-1], 0), (prompt[-1:], len(prompt) - 1)):
        step = SequenceStep(1, tokens, start, table, True)
        batch = build_batch([step], 4, runner.cache.device)
        with torch.inference_mode():
            logits = runner.model.logits(runner.model.forward(batch, runner.cache.layers))
    assert logits is not None
    return logits[0]


def check(folder: Path, file: Path, operators: Operators | None = None) -> None:
    assert_logits(file, dequantised(folder, file, file.with_suffix(".plain")), operators)


def assert_logits(file: Path, plain: Path, operators: Operators | None = None) -> None:
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    size = read_spec(file).vocab_size  # a converter may have cut it
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, min(500, size), (40,), generator=generator).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0, -1, :size]
    result = logits_of(file, prompt, operators)
    torch.testing.assert_close(result, expected, atol=2e-4, rtol=2e-4)


def check_compiled(folder: Path, file: Path, *, quantised: bool) -> None:
    """As ``check``, with activations as kernels for bytes round them."""
    operators = compiled_operators()
    if quantised and jit.multiplies_bytes():
        expected = logits_of(file, PROMPT, RoundedOperators())
        # Sums that differ in the last digit may be rounded to another code, here and there.
        error = (logits_of(file, PROMPT, operators) - expected).norm() / expected.norm()
        assert error < 0.03
    else:
        check(folder, file, operators)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_logits_of_transformers(root: Path, name: str) -> None:
    folder = checkpoint(root, name)
    check(folder, write_gguf(folder, root / f"{name}.gguf", "Q8_0"))


@pytest.mark.usefixtures("decoded_once")
@pytest.mark.parametrize("kind", TYPES)
def test_a_type_has_the_logits_of_its_dequantised_weights(root: Path, kind: str) -> None:
    """On one rank and on two, which have whole blocks of a feed-forward's inputs, and not equally
    many; a large block of the output's inputs is cut, and they have that weight as numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 32}
    folder = checkpoint(root, "llama_bias", num_hidden_layers=2, **sizes)
    file = write_gguf(folder, root / f"{kind}.gguf", kind)
    plain = dequantised(folder, file, root / f"{kind}.plain")
    ranks = check_on_ranks(file, PROMPT, partial(after, plain))
    for rank in ranks.runners:
        layer: Any = rank.model.layers[1]
        methods = [type(each.method) for each in (layer.mlp.down, layer.attention.o)]
        if kind in BLOCK_FORMATS:
            cut = BLOCK_FORMATS[kind].values > 128
            assert methods == [QuantizedMethod, DenseMethod if cut else QuantizedMethod]
    check_compiled(folder, file, quantised=kind in BLOCK_FORMATS)


def after(plain: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The logits of transformers, of a prompt's last token and of what was drawn."""
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 :]


@pytest.mark.parametrize("name", NEW)
def test_a_file_is_the_model_of_its_folder(tmp_path: Path, name: str) -> None:
    """Its spec, and the logits of transformers."""
    folder = tmp_path / name
    tiny_models.build(name, folder, **NEW[name])
    file = write_gguf(folder, tmp_path / f"{name}.gguf")
    spec, expected = read_spec(file), read_spec(folder)
    assert replace(spec, eos_token_ids=expected.eos_token_ids) == expected
    assert_logits(file, folder)


@pytest.mark.usefixtures("decoded_once")
@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        *((name, "Q8_0", {}) for name in ("deepseek_v2", "gpt_oss", "mixtral")),
        *((name, "Q4_0", {}) for name in ("deepseek_v2", "gpt_oss", "mixtral")),
        ("gpt_oss", "MXFP4", {"intermediate_size": 64}),
        ("qwen3_moe", "Q4_K", WIDE_EXPERTS),
        ("qwen3_moe", "IQ3_XXS", WIDE_EXPERTS),
    ],
)
def test_a_quantised_file_has_the_logits_of_its_weights(
    tmp_path: Path, name: str, kind: str, sizes: dict[str, Any]
) -> None:
    """Where tensors are put together, or experts are stacked or have biases: against the same file
    in numbers."""
    folder = tmp_path / name
    tiny_models.build(name, folder, **NEW.get(name, {}) | sizes)
    # gpt-oss is published so: its experts in MXFP4.
    others = {"attn": "Q8_0", "token_embd": "Q8_0", "output": "Q8_0"} if kind == "MXFP4" else {}
    file = write_gguf(folder, tmp_path / "quantised.gguf", kind, others=others)
    with open_source(file) as source:
        matrices = [each for each in source.names() if "ffn_up" in each and "weight" in each]
        assert {source.dtype(each) for each in matrices} == {kind}
    plain = build_ranks(in_numbers(file, tmp_path / "plain.gguf"))

    def expected(prompt: list[int], output: list[int]) -> torch.Tensor:
        return plain.logits([prompt, *([token] for token in output)], 0, list(range(20)))

    check_on_ranks(file, PROMPT, expected)


@pytest.mark.usefixtures("decoded_once")
@pytest.mark.parametrize("name", ["llama_bias", "phi3", "qwen3_moe", "qwen3_tied"])
def test_matrices_of_one_layer_may_differ_in_type(root: Path, name: str) -> None:
    """Neighbours of one type are multiplied together, and embeddings are looked up in any."""
    others = {"attn_v": "Q8_0", "ffn_up": "F16", "ffn_gate_exps": "Q4_1", "token_embd": "Q4_0"}
    folder = checkpoint(root, name)
    file = write_gguf(folder, root / f"{name}-mixed.gguf", "Q4_0", others=others)
    plain = dequantised(folder, file, root / f"{name}-mixed.plain")
    check_on_ranks(file, PROMPT, partial(after, plain))
    check_compiled(folder, file, quantised=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_spec_is_that_of_the_config(root: Path, name: str) -> None:
    folder = checkpoint(root, name)
    file = write_gguf(folder, root / f"{name}-spec.gguf")
    spec = read_spec(file)
    expected = read_spec(folder)
    # The file's tokenizer has the end of a turn as well.
    assert spec.eos_token_ids == (256, 258)
    if name == "llama":  # whose factors are no published model's, and are kept as they are
        layers = tuple(replace(layer, rope=None) for layer in spec.layers)
        assert layers == tuple(replace(layer, rope=None) for layer in expected.layers)
        spec = replace(spec, layers=expected.layers)
    assert replace(spec, eos_token_ids=expected.eos_token_ids) == expected


@pytest.mark.parametrize("name", ["internlm2", "exaone", "mistral3"])
def test_other_names_of_llama(root: Path, name: str) -> None:
    """Of which transformers has no model, or a wrapper only: the same metadata, but its prefix."""
    folder = checkpoint(root, "llama_linear", rope_parameters=None)
    source: Any = open_source(write_gguf(folder, root / f"{name}-name.gguf"))
    metadata = {
        key.replace("llama.", f"{name}.", 1): value for key, value in source.header.metadata.items()
    }
    source.header = replace(source.header, metadata=metadata | {"general.architecture": name})
    expected = replace(read_spec(folder), eos_token_ids=(256, 258))
    assert spec_of(source.config(), frozenset(), None) == expected


def test_the_scaling_of_llama_3_is_recognised_by_its_factors(root: Path) -> None:
    rope = LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0}
    folder = checkpoint(root, "llama", rope_parameters=rope, head_dim=64)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "llama3"
    file = write_gguf(folder, root / "llama3.gguf")
    assert read_spec(file).layers == read_spec(folder).layers


def test_yarn_has_the_bounds_that_a_file_names(root: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)
        writer.add_float32("llama.rope.scaling.yarn_beta_slow", 2.0)

    folder = checkpoint(root, "llama_yarn")
    rope = read_spec(write_gguf(folder, root / "betas.gguf", change=add)).layers[0].rope
    assert rope is not None and isinstance(rope.scaling, YarnScaling)
    assert (rope.scaling.beta_fast, rope.scaling.beta_slow) == (16.0, 2.0)


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q4_0": "quantized"}


@pytest.mark.parametrize("kind", DTYPES)
def test_the_dtype_is_that_of_matrices(root: Path, kind: str) -> None:
    folder = checkpoint(root, "qwen3")
    assert read_spec(write_gguf(folder, root / f"dtype-{kind}.gguf", kind)).dtype == DTYPES[kind]


def test_a_quantised_file_runs_in_float32_on_a_cpu(root: Path) -> None:
    spec = read_spec(write_gguf(checkpoint(root, "qwen3"), root / "auto.gguf", "Q4_0"))
    assert spec.dtype_for("auto", on_cpu=True) == "float32"
    assert spec.dtype_for("auto", on_cpu=False) == "bfloat16"
    assert spec.dtype_for("bfloat16", on_cpu=True) == "bfloat16"


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_a_load_needs_the_result_and_a_layer(root: Path, kind: str) -> None:
    """Bytes that torch allocates, at any moment of a load."""
    folder = checkpoint(root, "qwen3", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    file = write_gguf(folder, root / f"peak-{kind}.gguf", kind)
    load_model(file)  # packed products are tried once
    with torch.profiler.profile(profile_memory=True) as profile:
        model = load_model(file)
    events = profile.profiler.kineto_results.events()
    sizes = [event for event in events if event.name() == "[memory]"]
    sizes.sort(key=lambda event: event.start_ns())
    totals = list(accumulate(event.nbytes() for event in sizes))
    assert len(model.layers) == 8
    size = file.stat().st_size
    if kind != "BF16" or multiplies(torch.bfloat16):
        assert totals[-1] > 0.9 * size and max(totals) - totals[-1] <= size / 8
    else:  # packed from float32, one matrix at a time, into memory that is not torch's
        assert max(totals) <= 2.5 * size / 8


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen2", "QWEN2VL"), ("qwen3_tied", "QWEN3VL"), ("qwen3_moe", "QWEN3VLMOE")],
)
def test_the_text_part_of_a_model_of_images_is_a_text_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    folder = checkpoint(root, name)
    text = write_gguf(folder, tmp_path / "text.gguf")
    family = json.loads((folder / "config.json").read_text())["model_type"]
    monkeypatch.setitem(gguf_files._ARCHITECTURES, family, gguf.MODEL_ARCH[kind])

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([24, 20, 20, 0])
        writer.add_num_deepstack_layers(3)

    file = write_gguf(folder, tmp_path / "model.gguf", change=add)
    assert read_spec(file) == read_spec(text)
    assert torch.equal(logits_of(file, PROMPT), logits_of(text, PROMPT))
