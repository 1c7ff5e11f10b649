"""Ranks that are processes and talk over gloo give the tokens of one, and four ranks the logits of
transformers. Each family is on two ranks in ``test_parity.py``, each format in the tests of
``shared/weights``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import dequantised, write_gguf
from tandem.tests.support.checkpoints.kv_scales import NAMINGS, write_kv_scales
from tandem.tests.support.ranks import Meeting, ThreadRank, build_ranks

from .test_kv_formats import rounded_run
from .test_parity import DECODED, check_following, prompt_of, reference_run, scattered_slots

RANKS = Path(__file__).with_name("tensor_parallel_ranks.py")

# A vocabulary of no equal parts is gathered, norms of all heads are summed, and so are experts.
OF_TWO = ("odd_vocabulary", "olmo2", "qwen3_moe")
# With two KV heads, each is held by two ranks of four. A latent is held by all.
OF_FOUR = (
    *("qwen3", "odd_vocabulary", "deepseek_v2_groups", "deepseek_v3_dense", "olmo2", "cohere"),
    *("gpt_oss", "hunyuan", "minimax_m2"),
)

# A checkpoint, a prompt, and the tokens that follow it.
Model = tuple[str, list[int], list[int]]


def folder_of(name: str, root: Path) -> Path:
    if name != "odd_vocabulary":
        return tiny_models.cached(name, root)
    if not (root / name).is_dir():
        tiny_models.build("llama", root / name, vocab_size=513)
    return root / name


def plain(name: str, root: Path) -> Model:
    folder = folder_of(name, root)
    return str(folder), prompt_of(50), reference_run(folder, 50)[0][:DECODED]


def quantised(root: Path) -> Model:
    """Three blocks of inputs, of which the second rank has two."""
    folder = root / "uneven"
    tiny_models.build("llama_bias", folder, hidden_size=256, intermediate_size=768)
    file = write_gguf(folder, root / "uneven.gguf", "Q4_K")
    decoded = dequantised(folder, file, root / "uneven.plain")
    return str(file), prompt_of(50), reference_run(decoded, 50)[0][:DECODED]


def test_processes_give_the_tokens_of_one(model_root: Path, tmp_path: Path) -> None:
    """And the log-probabilities of a prompt; one rank has them, the others nothing."""
    of_two = [*(plain(name, model_root) for name in OF_TWO), quantised(tmp_path)]
    groups = [(2, of_two), (4, [plain("qwen3", model_root)])]
    for (_, models), (first, *others) in zip(groups, run_ranks(groups, tmp_path), strict=True):
        assert first == [{"drawn": tokens, "scored": 49} for _, _, tokens in models]
        assert all(rank == [{"drawn": [], "scored": 0}] * len(models) for rank in others)


def run_ranks(groups: list[tuple[int, list[Model]]], folder: Path) -> list[list[list[object]]]:
    """What each rank of each group drew of each of its models."""
    ranks = subprocess.Popen(
        [sys.executable, str(RANKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    jobs = [
        {"size": size, "models": models, "rendezvous": str(folder / f"meet{size}")}
        for size, models in groups
    ]
    try:
        return list(json.loads(ranks.communicate(json.dumps(jobs), timeout=90)[0]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_have_the_logits_of_transformers(name: str, model_root: Path) -> None:
    folder = folder_of(name, model_root)
    check_following(build_ranks(folder, 4), folder, 0, scattered_slots(5, 70))


def test_two_ranks_have_the_scales_of_a_cache(model_root: Path, tmp_path: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    scales = write_kv_scales(folder, tmp_path / "scaled", NAMINGS["modelopt"])
    expected = rounded_run(folder, prompt_of(50), scales)
    parts = [prompt_of(50), *([token] for token in expected[:-1])]
    result = build_ranks(tmp_path / "scaled", 2).logits(parts, 0, scattered_slots(5, 70))
    assert result.argmax(-1).tolist() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_threads_that_do_not_meet_fail(rank: int) -> None:
    """What other tests rely on: neither a rank too few nor one too many goes unnoticed."""
    meeting = Meeting(2)
    ranks = [ThreadRank(each, 2, meeting) for each in range(2)]

    def work(own: int) -> torch.Tensor:
        x = ranks[own].all_reduce(torch.full((3,), own + 1.0))
        return x if own == rank else ranks[own].all_reduce(x)

    with pytest.raises(AssertionError, match=f"rank {1 - rank}"):
        meeting.run(work)
