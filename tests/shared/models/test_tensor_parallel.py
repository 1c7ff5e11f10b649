"""Two and four ranks give the tokens of one; they are processes that talk over gloo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.support.checkpoints import quantized_folders, tiny_models
from tandem.tests.support.checkpoints.gguf_files import dequantised, write_gguf
from tandem.tests.support.checkpoints.kv_scales import NAMINGS, write_kv_scales
from tandem.tests.support.checkpoints.quantized_folders import write_quantized

from .test_kv_formats import rounded_run
from .test_parity import prompt_of, reference_run

RANKS = Path(__file__).with_name("tensor_parallel_ranks.py")


# Two ranks have all of these in turn.
OF_TWO = (*tiny_models.MODELS, "qwen3_vl_moe")
# With two KV heads, each is held by two ranks of four. A latent is held by all.
OF_FOUR = (
    *("qwen3", "odd_vocabulary", "deepseek_v2_groups", "deepseek_v3_dense", "olmo2", "cohere"),
    *("gpt_oss", "hunyuan", "minimax_m2"),
)
# Ranks whose inputs begin within a block have that weight as numbers: half of 128 inputs, of heads,
# is no multiple of 256. Those of a feed-forward get whole blocks, and not equally many.
QUANTISED = {
    "llama_bias": "Q4_1",
    "qwen3_tied": "Q8_0",
    "phi3": "Q4_0",
    "qwen3_moe": "Q8_0",
    "wide": "Q6_K",
    "uneven": "Q4_K",
}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "odd_vocabulary": ("llama", {"vocab_size": 513}),
    "wide": ("llama_bias", {"hidden_size": 256, "intermediate_size": 512}),
    "uneven": ("llama_bias", {"hidden_size": 256, "intermediate_size": 768}),
}

# Blocks of all sizes, and inputs in another order, which are numbers where ranks share them.
METHODS = ("fp8 blocks", "fp8 channel", "gptq 4 order", "gptq 8", "awq", "nf4", "mlx 3")

# A checkpoint, a prompt, and the tokens that follow it.
Model = tuple[str, list[int], list[int]]


def folder_of(name: str, root: Path) -> Path:
    if name not in CHANGES:
        return tiny_models.cached(name, root)
    family, changes = CHANGES[name]
    tiny_models.build(family, root / name, **changes)
    return root / name


def plain(name: str, root: Path) -> Model:
    folder = folder_of(name, root)
    return str(folder), prompt_of(50), reference_run(folder, 50)[0]


def quantised(name: str, root: Path, folder: Path) -> Model:
    whole = folder_of(name, root)
    file = write_gguf(whole, folder / f"{name}.gguf", QUANTISED[name])
    decoded = dequantised(whole, file, folder / f"{name}.plain")
    return str(file), prompt_of(50), reference_run(decoded, 50)[0]


def coded(method: str, root: Path, folder: Path) -> Model:
    """A checkpoint of another method than GGUF's, and what follows from its numbers."""
    whole = folder_of("wide", root)
    saved, decoded = write_quantized(whole, folder / method, quantized_folders.METHODS[method])
    return str(saved), prompt_of(50), reference_run(decoded, 50)[0]


def scaled(root: Path, folder: Path) -> Model:
    """A checkpoint for KV in fp8, whose scales all ranks have."""
    whole = folder_of("qwen3", root)
    scales = write_kv_scales(whole, folder / "scaled", NAMINGS["modelopt"])
    return str(folder / "scaled"), prompt_of(50), rounded_run(whole, prompt_of(50), scales)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one(size: int, model_root: Path, tmp_path: Path) -> None:
    """Most of what ranks cost is their start, so two have all models, quantised ones as well."""
    models = [plain(name, model_root) for name in {2: OF_TWO, 4: OF_FOUR}[size]]
    if size == 2:
        models += [quantised(name, model_root, tmp_path) for name in QUANTISED]
        models += [coded(method, model_root, tmp_path) for method in METHODS]
        models.append(scaled(model_root, tmp_path))
    first, *others = run_ranks(size, models, tmp_path / "meet")
    assert first == [{"drawn": tokens, "scored": 49} for _, _, tokens in models]
    assert all(rank == [{"drawn": [], "scored": 0}] * len(models) for rank in others)


def run_ranks(size: int, models: list[Any], rendezvous: Path) -> list[Any]:
    """What each rank drew of each model."""
    job = {"size": size, "models": models, "rendezvous": str(rendezvous)}
    ranks = subprocess.Popen(
        [sys.executable, str(RANKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return list(json.loads(ranks.communicate(json.dumps(job), timeout=90)[0]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
