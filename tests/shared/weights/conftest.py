"""A deep model, runners whose KV is compared with that of its quantised versions, and quantised
weights that are decoded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.quantized import QuantizedWeight
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

_DEEP: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12}


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep") / "model"
    tiny_models.build("qwen3", folder, dtype="bfloat16", **_DEEP)
    return folder


@pytest.fixture(scope="session")
def senders(deep: Path) -> tuple[ModelRunner, ModelRunner]:
    """Of that model, and of one with other weights."""
    other = deep.with_name("other")
    tiny_models.build("qwen3", other, seed=1, dtype="bfloat16", **_DEEP)
    same, different = (
        build_runner(folder, dtype="bfloat16", block_size=8, num_blocks=24)
        for folder in (deep, other)
    )
    return same, different


@pytest.fixture
def decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quantised weight is decoded by the first of the test's forwards that needs it, rather
    than by all of them."""
    values = QuantizedWeight.values
    decoded: dict[object, tuple[QuantizedWeight, torch.Tensor]] = {}

    def remembered(weight: QuantizedWeight) -> torch.Tensor:
        tensors = (weight.blocks, *([] if weight.order is None else [weight.order]))
        places = ((each.data_ptr(), each.shape, each.stride()) for each in tensors)
        key = weight.format, *places
        if key not in decoded:  # with the weight, so that nothing else has its place
            decoded[key] = weight, values(weight)
        return decoded[key][1]

    monkeypatch.setattr(QuantizedWeight, "values", remembered)
