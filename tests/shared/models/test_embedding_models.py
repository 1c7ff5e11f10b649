"""Models of embeddings as they are published, against sentence-transformers' rules: the files
beside the weights say how texts begin and end, which tokens make the vector, and what layers change
it. With sentence-transformers installed, its own vectors are compared too.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from tandem.shared.engine.plan import HiddenStates, PooledRow, SequenceStep, StepPlan
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

TEXTS = ["How many people live in Berlin?", "one", "Berlin has museums. " * 4]
BOTH, END, START = "<|im_start|> $A <|im_end|>", "$A <|im_end|>", "<|im_start|> $A"
QUERY = "Instruct: Given a web search query, retrieve relevant passages\nQuery: "


@dataclass(frozen=True)
class Published:
    """A family's tiny model with the files of a published one: the pooling, the special tokens that
    its tokenizer puts around a text, and its prompts. ``flat``: tensors are saved without the first
    part of their names, and there is no head."""

    model: str
    pooling: str
    around: str
    prompts: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    flat: bool = False
    config: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "intfloat/e5-mistral-7b-instruct": Published(
        "mistral", "lasttoken", "<|im_start|> $A <|im_end|>", {"web_search_query": QUERY}, flat=True
    ),
    "Qwen/Qwen3-Embedding-0.6B": Published(
        "qwen3", "lasttoken", END, {"query": QUERY, "document": ""}, flat=True
    ),
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": Published(
        "qwen2", "lasttoken", END, {"query": QUERY}, flat=True, config={"is_causal": False}
    ),
    "Qwen/Qwen3-VL-Embedding-2B": Published("qwen3_vl", "lasttoken", END),
    "google/embeddinggemma-300m": Published(
        "embedding_gemma", "mean_tokens", BOTH, {"query": "task: search result | query: "}
    ),
    "BAAI/bge-m3": Published("xlm_roberta", "cls_token", BOTH),
    "BAAI/bge-base-en-v1.5": Published("bert", "cls_token", BOTH),
    "intfloat/multilingual-e5-base": Published(
        "xlm_roberta", "mean_tokens", BOTH, {"query": "query: ", "passage": "passage: "}, "query"
    ),
    "thenlper/gte-base": Published("bert", "mean_tokens", BOTH),
    "sentence-transformers/all-MiniLM-L6-v2": Published("bert", "mean_tokens", BOTH),
    "sentence-transformers/all-mpnet-base-v2": Published("mpnet", "mean_tokens", BOTH),
    "Alibaba-NLP/gte-modernbert-base": Published("modernbert", "cls_token", BOTH),
}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def publish(name: str, model_root: Path, folder: Path) -> Path:
    """Write the files of a model as its repository has them."""
    variant = MODELS[name]
    shutil.copytree(tiny_models.cached(variant.model, model_root), folder)
    if variant.flat:
        _without_head(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | variant.config))
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<|im_start|>", tiny_models.IM_START), ("<|im_end|>", tiny_models.IM_END)]
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single=variant.around, special_tokens=special
    )
    raw.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    side = "left" if variant.pooling == "lasttoken" else "right"
    settings |= {"pad_token": "<|endoftext|>", "padding_side": side}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "lasttoken")
    pooling: dict[str, Any] = {f"pooling_mode_{mode}": mode == variant.pooling for mode in modes}
    width = values.get("text_config", values)["hidden_size"]
    pooling |= {"word_embedding_dimension": width, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": variant.prompts, "default_prompt_name": variant.default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def _without_head(folder: Path) -> None:
    weights = (
        load_file(folder / "model.safetensors") if (folder / "model.safetensors").is_file() else {}
    )
    for shard in folder.glob("model-*.safetensors"):
        weights |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    weights.pop("lm_head.weight", None)
    short = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["architectures"] = [values["architectures"][0].replace("ForCausalLM", "Model")]
    (folder / "config.json").write_text(json.dumps(values))


def ours(folder: Path, prompt_name: str | None) -> np.ndarray[Any, Any]:
    """The vectors of all texts in one step, of length 1."""
    tokenizer = Tokenizer.load(read_tokenizer_files(folder))
    prompts = [tokenizer.encode(tokenizer.prompts.of(prompt_name) + text) for text in TEXTS]
    runner = build_runner(folder, dtype="float32", block_size=16, num_blocks=64)
    assert runner.model.spec.embeds
    kinds: dict[str, HiddenStates] = {"last": "last", "cls": "first", "mean": "sum"}
    pool = PooledRow(kinds[runner.model.spec.pooling])
    steps = [
        SequenceStep(n, prompt, 0, list(range(16 * n, 16 * n + 16)), sample=False, pool=pool)
        for n, prompt in enumerate(prompts)
    ]
    result = runner.execute(StepPlan.of(0, steps)).hidden
    vectors = np.stack([np.frombuffer(result[n], np.float32) for n in range(len(TEXTS))])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_the_rules(name: str, folder: Path, prompt_name: str | None) -> np.ndarray[Any, Any]:
    """The vectors as sentence-transformers' documentation makes them, by transformers."""
    values = MODELS[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = values.prompts.get(prompt_name or values.default or "", "")
    vectors = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(prompt + text)["input_ids"]])
        # A mask of zeros, which is added: later tokens are seen.
        both = {"attention_mask": torch.zeros(1, 1, ids.shape[1], ids.shape[1])}
        with torch.inference_mode():
            states = model(ids, **(both if values.config else {})).last_hidden_state[0]
        one = {"cls_token": states[0], "lasttoken": states[-1]}.get(values.pooling, states.mean(0))
        vectors.append((one / one.norm()).numpy())
    return np.stack(vectors)


def test_vectors_are_those_of_sentence_transformers(
    name: str, model_root: Path, tmp_path: Path
) -> None:
    folder = publish(name, model_root, tmp_path / "model")
    for prompt_name in (None, *MODELS[name].prompts):
        expected = by_the_rules(name, folder, prompt_name)
        np.testing.assert_allclose(ours(folder, prompt_name), expected, atol=1e-5)


def test_vectors_are_those_of_the_library(name: str, model_root: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    if MODELS[name].config:
        pytest.skip("the published folder has code of its own, which sees later tokens")
    if MODELS[name].model in tiny_models.WRAPPED:
        pytest.skip("the library loads a processor of images with it, which a tiny model lacks")
    folder = publish(name, model_root, tmp_path / "model")
    model = library.SentenceTransformer(str(folder), device="cpu")
    for prompt_name in (None, *MODELS[name].prompts):
        expected = model.encode(TEXTS, prompt_name=prompt_name, normalize_embeddings=True)
        np.testing.assert_allclose(ours(folder, prompt_name), expected, atol=1e-5)
