"""Encoders against transformers: hidden states, and vectors of texts of the Python API."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tandem import Engine, EngineConfig
from tandem.shared.engine.plan import SequenceStep
from tandem.shared.models.batch import build_batch
from tandem.shared.models.spec import Pooling
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

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


@pytest.mark.parametrize("name", [*tiny_models.ENCODERS, "gte"])
def test_hidden_states_are_those_of_transformers(name: str, model_root: Path) -> None:
    """Of several prompts in one step, over scattered blocks."""
    folder = gte(model_root) if name == "gte" else tiny_models.cached(name, model_root)
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
    wanted = expected(folder) if name != "gte" else _both_ways(folder)
    torch.testing.assert_close(hidden, torch.cat(wanted), atol=1e-4, rtol=1e-4)


def _both_ways(folder: Path) -> list[torch.Tensor]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = []
    for prompt in prompts():
        seen = torch.zeros(1, 1, len(prompt), len(prompt))
        with torch.inference_mode():
            states.append(model(torch.tensor([prompt]), attention_mask=seen).last_hidden_state[0])
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
        wanted = rows.get(pooling or "mean", states.mean(0))
        np.testing.assert_allclose(vector.values, wanted / wanted.norm(), atol=1e-5)
