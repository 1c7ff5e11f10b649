"""Ranks' parts of quantised matrices: whole blocks of inputs, where there are enough of them."""

from __future__ import annotations

import pytest

from tandem.kernels.block_formats import Q4_K, Q8_0, BlockFormat
from tandem.shared.models.parallel import TensorParallel


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
