"""The Triton product with quantised weights against the reference: on a GPU if there is one, else
as Triton interprets it. Without Triton it is skipped."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.block_formats import BLOCK_FORMATS, CODEBOOK_FORMATS, BlockFormat
from tandem.kernels.gpu import quantized_trial
from tandem.kernels.gpu.operators import MOST_ROWS, GpuOperators
from tandem.kernels.gpu.quantized_trial import largest_error, limit, works
from tandem.kernels.quantized import QuantizedWeight, dequantize, grouped_codes
from tandem.tests.support.random_blocks import GROUPS, random_weight

pytest.importorskip("triton")

from tandem.kernels.gpu.quantized_linear import ROWS, multiply

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Those of which Triton multiplies codes.
FORMATS = [*sorted({*BLOCK_FORMATS} - {each.name for each in CODEBOOK_FORMATS}), *GROUPS]
ALL = BLOCK_FORMATS | GROUPS
CODEBOOKS = sorted(each.name for each in CODEBOOK_FORMATS)


@pytest.mark.parametrize("rows", [1, 19, MOST_ROWS])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_values(name: str, rows: int) -> None:
    torch.manual_seed(0)
    kind = ALL[name]
    weight = random_weight(kind, 45, 3 if kind.values < 128 else 1)
    weight = QuantizedWeight(kind, weight.blocks.to(DEVICE))
    x = torch.randn(rows, weight.inputs, device=DEVICE)
    expected = x @ dequantize(weight).T
    found = multiply(x, grouped_codes(weight))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_trial_passes(name: str, rows: int) -> None:
    error = largest_error(ALL[name], torch.float32, DEVICE, rows)
    assert 0 <= error < limit(torch.float32)


def test_one_row_of_which_a_part_is_multiplied() -> None:
    """Its memory may begin anywhere."""
    weight = random_weight(BLOCK_FORMATS["Q8_0"], 45, 3)
    weight = QuantizedWeight(weight.format, weight.blocks.to(DEVICE))
    x = torch.randn(1, 3 + weight.inputs, device=DEVICE)[:, 3:]
    expected = x @ dequantize(weight).T
    torch.testing.assert_close(multiply(x, grouped_codes(weight)), expected, atol=1e-4, rtol=1e-4)


def test_a_product_that_is_wrong_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = BLOCK_FORMATS["Q8_0"]
    tried: list[tuple[str, int]] = []

    def some(kind: BlockFormat, dtype: torch.dtype, device: torch.device, rows: int) -> float:
        tried.append((kind.name, rows))
        return 0.9 if rows == wrong else 0.0

    monkeypatch.setattr(quantized_trial, "largest_error", some)
    for wrong in (0, ROWS[-1]):
        works.cache_clear()
        assert works(kind, torch.float32, torch.device("cuda")) == (wrong == 0)
        assert bool(caplog.text) == (wrong != 0)
    assert "Q8_0 is decoded for each product, because of Triton: its results are" in caplog.text
    assert tried == 2 * [(kind.name, rows) for rows in ROWS]
    assert not works(kind, torch.float32, torch.device("cpu"))
    works.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "IQ4_NL", *CODEBOOKS])
def test_operators_take_any_number_of_rows(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(BLOCK_FORMATS[name], 45, 3)
    weight = QuantizedWeight(weight.format, weight.blocks.to(DEVICE))
    bias = torch.linspace(-1, 1, 45, device=DEVICE)
    monkeypatch.setattr(quantized_trial, "works", lambda *_: True)
    x = torch.randn(rows, weight.inputs, device=DEVICE)
    found = GpuOperators().prepare_quantized(weight, bias, x.dtype)(x)
    expected = torch.nn.functional.linear(x, dequantize(weight), bias)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
