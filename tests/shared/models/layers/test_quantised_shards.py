"""Ranks' parts of quantised matrices: whole blocks of inputs, where there are enough of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.block_formats import BLOCK_FORMATS, Q4_K, Q8_0, BlockFormat
from tandem.shared.models.layers.linear_method import DenseMethod, QuantizedMethod
from tandem.shared.models.parallel import TensorParallel
from tandem.shared.weights.load import load_model
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("total", "format", "size", "expected"),
    [
        (96, None, 2, [48, 48]),
        (96, Q8_0, 2, [32, 64]),
        (96, Q8_0, 3, [32, 32, 32]),
        (768, Q4_K, 2, [256, 512]),
        (1280, Q4_K, 4, [256, 256, 256, 512]),
        # One of four would get nothing.
        (768, Q4_K, 4, [192, 192, 192, 192]),
        (96, Q4_K, 2, [48, 48]),
    ],
)
def test_inputs_of_ranks(
    total: int, format: BlockFormat | None, size: int, expected: list[int]
) -> None:
    shards = [TensorParallel(rank, size).shard_of_inputs(total, format) for rank in range(size)]
    assert [len(shard) for shard in shards] == expected
    assert [index for shard in shards for index in shard] == list(range(total))


@pytest.mark.parametrize("kind", sorted({*BLOCK_FORMATS} - {"Q1_0", "Q2_0"}))
def test_ranks_have_blocks_and_the_sum_of_one(tmp_path: Path, kind: str) -> None:
    """Two ranks have blocks of each matrix, and four the numbers where a block is cut."""
    folder = tmp_path / "model"
    changes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    tiny_models.build("llama_bias", folder, num_hidden_layers=1, **changes)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for size, cut in ((1, False), (2, False), (4, BLOCK_FORMATS[kind].values > 192)):
        parts = [load_model(file, tp=TensorParallel(rank, size)).layers[0] for rank in range(size)]
        total = torch.zeros_like(x)
        for part in parts:
            mlp: Any = part.mlp
            total += mlp.partial(x)
            assert isinstance(mlp.up.method, QuantizedMethod)
            assert isinstance(mlp.down.method, DenseMethod if cut else QuantizedMethod)
        if size == 1:
            expected = total
        largest = float(expected.abs().max())
        torch.testing.assert_close(total, expected, atol=1e-5 * largest, rtol=1e-5)
