"""The casts to and from e4m3, value by value."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.fp8 import FP8, castable, indexable

CODES = torch.arange(256, dtype=torch.uint8).view(FP8)
NUMBERS = CODES[~CODES.float().isnan()]
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@WIDE
@pytest.mark.parametrize("codes", [CODES, NUMBERS], ids=["with NaN", "numbers"])
def test_every_code_is_read_as_torch_reads_it(codes: torch.Tensor, dtype: torch.dtype) -> None:
    result = castable(codes, dtype).to(dtype)
    torch.testing.assert_close(result, codes.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(
        result.signbit() | result.isnan(), codes.to(dtype).signbit() | result.isnan()
    )


@WIDE
def test_every_code_survives_the_way_there_and_back(dtype: torch.dtype) -> None:
    wide = NUMBERS.to(dtype)
    assert torch.equal(indexable(castable(wide, FP8).to(FP8)), indexable(NUMBERS))


@WIDE
def test_what_it_cannot_hold_becomes_the_largest_value(dtype: torch.dtype) -> None:
    x = torch.tensor([447.0, 500.0, -6e4, torch.inf, torch.nan, 0.25]).to(dtype)
    expected = torch.tensor([448.0, 448.0, -448.0, 448.0, torch.nan, 0.25])
    result = castable(x, FP8).to(FP8).float()
    torch.testing.assert_close(result, expected, equal_nan=True)


def test_views_that_are_not_contiguous_are_read_and_left_as_they_are() -> None:
    cache = torch.randn(3, 50, 8).to(FP8)
    for part in (cache[:, 7:19], cache[1:, ::5], cache.transpose(0, 1), cache[:, :0]):
        expected = part.float()
        assert torch.equal(castable(part, torch.float32), expected)
        assert torch.equal(part.float(), expected)


def test_other_formats_are_not_touched() -> None:
    x = torch.randn(4)
    assert castable(x, torch.bfloat16) is x and castable(CODES, FP8) is CODES and indexable(x) is x
