"""The digest of a checkpoint: equal however it is divided into files, unless a tensor differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.weights.digest import weights_digest
from tandem.shared.weights.folder_kind import INDEX, SINGLE
from tandem.shared.weights.source import open_source
from tandem.tests.support.checkpoints.gguf_files import write_gguf

NORM, MATRIX = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    generator = torch.Generator().manual_seed(1)
    shapes = {NORM: (64,), MATRIX: (64, 64), "lm_head.weight": (100, 64)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def digest_of(folder: Path, *shards: Weights) -> str:
    folder.mkdir()
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE)
    else:
        files = {f"model-{number}.safetensors": each for number, each in enumerate(shards)}
        for file, each in files.items():
            save_file(each, folder / file)
        places = {name: file for file, each in files.items() for name in each}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return weights_digest(open_source(folder).stored())


def test_files_make_no_difference(tmp_path: Path) -> None:
    whole = digest_of(tmp_path / "one", weights())
    first = weights()
    second = {NORM: first.pop(NORM)}
    assert digest_of(tmp_path / "two", first, second) == whole
    assert whole.startswith("3 tensors of F32 (")


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each[NORM][63:].add_(1e-3),
        lambda each: each[MATRIX][:1, 5:6].neg_(),
        lambda each: each.update({MATRIX: each[MATRIX].bfloat16()}),
        lambda each: each.update({MATRIX: each[MATRIX].view(32, 128)}),
        lambda each: each.pop("lm_head.weight"),
    ],
)
def test_another_training_or_format_has_another_digest(
    change: Callable[[Weights], object], tmp_path: Path
) -> None:
    changed = weights()
    change(changed)
    assert digest_of(tmp_path / "a", weights()) != digest_of(tmp_path / "b", changed)


def test_the_formats_of_a_gguf_are_told_apart(tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q4_0"):
        file = write_gguf(builtin_model_path(), tmp_path / f"{kind}.gguf", kind)
        assert f"tensors of F32, {kind} (" in weights_digest(open_source(file).stored())
