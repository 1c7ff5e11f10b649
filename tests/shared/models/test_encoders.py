"""Encoders against transformers: hidden states, and vectors of texts of the Python API."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from tandem import Engine, EngineConfig
from tandem.shared.engine.plan import PooledRow, SequenceStep, StepPlan
from tandem.shared.errors import ModelError, RequestError
from tandem.shared.models.config_files import ModelConfig, read_config
from tandem.shared.models.registry import spec_of
from tandem.shared.models.spec import Pooling, ScoreActivation
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

pytestmark = pytest.mark.usefixtures("forked_ranks")

LENGTHS = (1, 50, 17)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 500, (n,), generator=generator).tolist() for n in LENGTHS]


def expected(folder: Path) -> list[torch.Tensor]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts()]


def gte(model_root: Path) -> Path:
    """A decoder that was trained to see later tokens."""
    folder = model_root / "gte"
    tiny_models.build("qwen2", folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "is_causal": False}))
    return folder


@pytest.mark.parametrize("name", [*tiny_models.ENCODERS, *tiny_models.ENCODING_DECODERS, "gte"])
def test_hidden_states_are_those_of_transformers(name: str, model_root: Path) -> None:
    folder = gte(model_root) if name == "gte" else tiny_models.cached(name, model_root)
    check_hidden_states(folder, _both_ways(folder) if name == "gte" else expected(folder))


@pytest.mark.parametrize("name", tiny_models.ENCODERS)
def test_an_encoder_may_have_odd_sizes(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 100}
    tiny_models.build(name, tmp_path, vocab_size=517, num_hidden_layers=2, **sizes)
    check_hidden_states(tmp_path, expected(tmp_path))


def check_hidden_states(folder: Path, reference: list[torch.Tensor]) -> None:
    """Of several prompts in one step, over scattered blocks."""
    runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=60)
    assert runner.model.spec.bidirectional
    tables, first = [], 0
    for length in LENGTHS:
        blocks = -(-length // 4)
        tables.append([first + 2 * index for index in range(blocks)][::-1])
        first += 2 * blocks
    steps = [
        SequenceStep(index, prompt, 0, [number % 60 for number in table], False)
        for index, (prompt, table) in enumerate(zip(prompts(), tables, strict=True))
    ]
    batch = build_batch(steps, 4, torch.device("cpu"), list(range(sum(LENGTHS))))
    with torch.inference_mode():
        hidden = runner.model.forward(batch, runner.cache.kv)
    torch.testing.assert_close(hidden, torch.cat(reference), atol=1e-4, rtol=1e-4)


def _both_ways(folder: Path) -> list[torch.Tensor]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = []
    for prompt in prompts():
        mask = torch.zeros(1, 1, len(prompt), len(prompt))
        with torch.inference_mode():
            states.append(model(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0])
    return states


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "last"])
def test_vectors_are_pooled_as_the_model_says(pooling: Pooling | None, tmp_path: Path) -> None:
    """A step is shorter than the prompts, which are computed whole all the same."""
    folder = tmp_path / "bert"
    tiny_models.build("bert", folder)
    (folder / "1_Pooling").mkdir()
    mode = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    config = EngineConfig(model=str(folder), dtype="float32", max_num_batched_tokens=16)
    with Engine(config) as engine:
        vectors = engine.embed(prompts(), pooling=pooling)
    for vector, states in zip(vectors, expected(folder), strict=True):
        rows = {"cls": states[0], "last": states[-1]}
        reference = rows.get(pooling or "mean", states.mean(0))
        np.testing.assert_allclose(vector.values, reference / reference.norm(), atol=1e-5)


def test_the_files_limit_texts_unless_the_user_asks_for_more(
    model_root: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_models.cached("bert", model_root), tmp_path / "bert"))
    limits: list[tuple[str, Any, int]] = [
        ("sentence_xlnet_config.json", {"max_seq_length": 30}, 30),
        ("sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False}, 20),
        ("sentence_bert_config.json", {"max_seq_length": 5000}, 130),
        ("sentence_bert_config.json", {"max_seq_length": None}, 130),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, 130),
    ]
    for file, values, context in limits:
        (folder / file).write_text(json.dumps(values))
        config = read_config(folder)
        assert spec_of(config).max_position == context
        assert spec_of(config, max_model_len=100).max_position == max(100, context)
        assert spec_of(config, max_model_len=9000).max_position == 130
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "128"}')
    with pytest.raises(ModelError, match="max_seq_length is '128'; supported: a positive integer"):
        read_config(folder)


def test_a_text_beyond_the_limit_is_cut_on_demand(model_root: Path, tmp_path: Path) -> None:
    """Within its special tokens, as sentence-transformers cuts it."""
    folder = Path(shutil.copytree(tiny_models.cached("bert", model_root), tmp_path / "bert"))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<|im_start|>", tiny_models.IM_START), ("<|im_end|>", tiny_models.IM_END)]
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=special
    )
    raw.save(str(folder / "tokenizer.json"))
    text = "Berlin has museums. " * 9
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
        with pytest.raises(RequestError, match="maximum context length is 20 tokens"):
            engine.embed([text])
        with pytest.raises(RequestError, match=r"must be -1 .* or from 1 to 20"):
            engine.embed([text], truncate_prompt_tokens=21)
        for limit, length in ((-1, 20), (9, 9)):
            raw.enable_truncation(length)
            tokens = raw.encode(text).ids
            assert len(tokens) == length and tokens[-1] == tiny_models.IM_END
            [ids] = engine.encode([text], pooling="mean", truncate_prompt_tokens=limit)
            with torch.inference_mode():
                reference = model(torch.tensor([tokens])).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(ids.values, reference, atol=1e-5)
        plain = engine.embed([list(range(30, 60))], truncate_prompt_tokens=-1)
        assert plain[0].prompt_tokens == 20
        [score] = engine.score(text, [text], truncate_prompt_tokens=-1)
        assert score.value == pytest.approx(1)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", [*tiny_models.CROSS_ENCODERS, *tiny_models.DECODING_SCORERS])
def test_scores_are_those_of_transformers(name: str, labels: int, tmp_path: Path) -> None:
    """Of several pairs in one step, as a rank returns them; BERT knows which text is the second."""
    folder = tmp_path / name
    tiny_models.build(name, folder, num_labels=labels)
    runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=60)
    kinds = runner.model.spec.segments
    pairs = [(prompt, 1 + len(prompt) // 2 if kinds > 1 else 0) for prompt in prompts()[1:]]
    steps = [
        SequenceStep(
            index, prompt, 0, list(range(20 * index, 20 * index + 20)), False,
            pool=PooledRow(
                "last" if name in tiny_models.DECODING_SCORERS else "first", True, second
            ),
        )
        for index, (prompt, second) in enumerate(pairs)
    ]  # fmt: skip
    result = runner.execute(StepPlan.of(0, steps)).hidden
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for index, (prompt, second) in enumerate(pairs):
        segments = [int(0 < second <= place) for place in range(len(prompt))]
        numbers = {"token_type_ids": torch.tensor([segments])} if second else {}
        with torch.inference_mode():
            reference = model(torch.tensor([prompt]), **numbers).logits
        score = np.frombuffer(result[index], np.float32)
        np.testing.assert_allclose(score, reference[0], atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": "linear.Identity"}, "none"),
        ({"sentence_transformers": "activation.Sigmoid", "problem_type": "regression"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "single_label_classification"}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
    ],
)
def test_a_models_files_say_what_makes_scores_of_logits(
    keys: dict[str, Any], activation: ScoreActivation, model_root: Path
) -> None:
    folder = tiny_models.cached("bert_scorer", model_root)
    values = json.loads((folder / "config.json").read_text()) | keys
    if name := keys.get("sentence_transformers"):
        values["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.{name}"}
    if "num_labels" in keys:
        del values["id2label"]
    classifier = spec_of(ModelConfig(values)).classifier
    assert classifier is not None and classifier.activation == activation


def test_a_model_tells_how_it_scores(model_root: Path) -> None:
    folders = {name: tiny_models.cached(name, model_root) for name in ("bert_scorer", "bert")}
    tiny_models.build("mpnet_scorer", model_root / "labels", num_labels=2)
    folders["labels"] = model_root / "labels"
    folders["qwen3"] = tiny_models.cached("qwen3", model_root)
    result = {name: spec_of(read_config(folder)).scoring for name, folder in folders.items()}
    assert result == {
        "bert_scorer": "pair",
        "bert": "vectors",
        "labels": "labels",
        "qwen3": None,
    }


def with_projections(folder: Path, **changes: Any) -> list[torch.Tensor]:
    """Write EmbeddingGemma's modules into a model's folder; the weights of the linear ones."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    modules += [("Dense", "3_Dense"), ("Normalize", "4_Normalize")]
    entries = [
        {"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    mode = {"pooling_mode_mean_tokens": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    hidden, weights = json.loads((folder / "config.json").read_text())["hidden_size"], []
    for name, inputs, outputs in (("2_Dense", hidden, 160), ("3_Dense", 160, 24)):
        (folder / name).mkdir()
        values = {"in_features": inputs, "out_features": outputs, "bias": False}
        values |= {"activation_function": "torch.nn.modules.linear.Identity", **changes}
        (folder / name / "config.json").write_text(json.dumps(values))
        generator = torch.Generator().manual_seed(outputs)
        weights.append(torch.randn(outputs, inputs, generator=generator))
        save_file({"linear.weight": weights[-1]}, folder / name / "model.safetensors")
    return weights


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "modernbert", "mpnet"])
def test_an_encoder_is_split_over_ranks(name: str, model_root: Path) -> None:
    folder = tiny_models.cached(name, model_root)
    config = EngineConfig(model=str(folder), dtype="float32", threads=1, tensor_parallel_size=2)
    with Engine(config) as engine:
        vectors = engine.encode(prompts(), pooling="cls")
    for vector, states in zip(vectors, expected(folder), strict=True):
        np.testing.assert_allclose(vector.values, states[0], atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_vectors_are_projected(kernels: str, tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    tiny_models.build("embedding_gemma", folder)
    first, second = with_projections(folder)
    config = EngineConfig(model=str(folder), dtype="float32", cpu_kernels=kernels)
    with Engine(config) as engine:
        vectors = engine.embed(prompts())
    for vector, states in zip(vectors, expected(folder), strict=True):
        reference = second @ (first @ states.mean(0))
        np.testing.assert_allclose(vector.values, reference / reference.norm(), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": True}, r"dense_modules\[0\]: bias is True; supported: False"),
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "activation_function is"),
        ({"in_features": 7}, "in_features is 7; supported: "),
    ],
)
def test_other_projections_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    tiny_models.build("embedding_gemma", folder)
    with_projections(folder, **changes)
    with pytest.raises(ModelError, match=words):
        build_runner(folder, num_blocks=4)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ({"type": "sentence_transformers.models.WeightedLayerPooling"}, "is not supported"),
        ({"type": "sentence_transformers.models.Pooling", "path": "../x"}, "not the name of a"),
        ("Pooling", "not a list of objects"),
    ],
)
def test_other_modules_are_refused(
    module: Any, words: str, model_root: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_models.cached("bert", model_root), tmp_path / "bert"))
    (folder / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(ModelError, match=words):
        build_runner(folder, num_blocks=4)


def test_rows_before_the_first_position_are_of_no_token(model_root: Path) -> None:
    """Of RoBERTa's 130 positions, two have numbers up to that of the padding token."""
    folders = [tiny_models.cached(name, model_root) for name in ("bert", "roberta", "mpnet")]
    assert [spec_of(read_config(folder)).max_position for folder in folders] == [130, 128, 128]
