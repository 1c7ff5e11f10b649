"""What tests of handed over weights share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

# Twelve layers in bfloat16: as many as rounding needs to add up.
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12}


@pytest.fixture(scope="session")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with different weights."""
    root = tmp_path_factory.mktemp("deep")
    for seed in (0, 1):
        tiny_models.build("qwen3", root / str(seed), seed=seed, dtype="bfloat16", **_WIDE)
    return [root / "0", root / "1"]


@pytest.fixture(scope="session")
def deep_senders(deep_models: list[Path]) -> list[ModelRunner]:
    """A runner of each of them."""
    return [
        build_runner(path, dtype="bfloat16", block_size=8, num_blocks=24) for path in deep_models
    ]
