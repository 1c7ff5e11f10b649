"""Two and four ranks give the tokens of one; they are processes that talk over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.support.gguf_files import dequantised, write_gguf

from ... import tiny_models
from .test_parity import prompt_of, reference_run

RANK = Path(__file__).with_name("tensor_parallel_rank.py")


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["qwen3", "qwen2", "llama", "llama_bias", "deepseek_v2", "deepseek_v3"]),
        (
            2,
            ["qwen3_moe", "qwen3_moe_mixed", "phi3", "phi3_partial", "gemma3", "gemma2", "smollm3"],
        ),
        # Two KV heads: each is held by two ranks. A latent is held by all.
        (4, ["qwen3", "odd_vocabulary", "deepseek_v2_groups", "deepseek_v3_dense"]),
    ],
)
def test_ranks_agree_with_one(
    size: int, names: list[str], model_root: Path, tmp_path: Path
) -> None:
    models = []
    for name in names:
        if name == "odd_vocabulary":
            folder = tmp_path / name
            tiny_models.build("llama", folder, vocab_size=513)
        else:
            folder = tiny_models.cached(name, model_root)
        models.append((str(folder), prompt_of(50), reference_run(folder, 50)[0]))
    first, *others = run_ranks(size, models, tmp_path / "meet")
    assert first == [{"drawn": tokens, "scored": 49} for _, _, tokens in models]
    assert all(rank == [{"drawn": [], "scored": 0}] * len(names) for rank in others)


def test_quantised_weights_are_split_by_whole_blocks(model_root: Path, tmp_path: Path) -> None:
    """Ranks whose inputs begin within a block have that weight as numbers: half of 96 inputs is no
    multiple of 32, and half of 128 none of 256."""
    wide = tmp_path / "wide"
    tiny_models.build("llama_bias", wide, hidden_size=256, intermediate_size=512)
    models = []
    for folder, kind in (
        (tiny_models.cached("llama_bias", model_root), "Q4_1"),
        (tiny_models.cached("qwen3_tied", model_root), "Q8_0"),
        (tiny_models.cached("phi3", model_root), "Q4_0"),
        (tiny_models.cached("qwen3_moe", model_root), "Q8_0"),
        (wide, "Q6_K"),
    ):
        file = write_gguf(folder, tmp_path / f"{folder.name}.gguf", kind)
        plain = dequantised(folder, file, tmp_path / f"{folder.name}.plain")
        models.append((str(file), prompt_of(50), reference_run(plain, 50)[0]))
    first, _ = run_ranks(2, models, tmp_path / "meet")
    assert [each["drawn"] for each in first] == [tokens for _, _, tokens in models]


def run_ranks(size: int, models: list[Any], rendezvous: Path) -> list[Any]:
    """What each rank drew of each model."""
    ranks = []
    for rank in range(size):
        rank_process = subprocess.Popen(
            [sys.executable, str(RANK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert rank_process.stdin is not None
        job = {"rank": rank, "size": size, "models": models, "rendezvous": str(rendezvous)}
        rank_process.stdin.write(json.dumps(job))
        rank_process.stdin.close()
        rank_process.stdin = None
        ranks.append(rank_process)
    try:
        return [json.loads(process.communicate(timeout=90)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
