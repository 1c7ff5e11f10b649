"""Quantisation: the library's bytes, or about the error of llama.cpp's own quantiser."""

from __future__ import annotations

import gguf
import pytest
import torch

from tandem.kernels.block_encoding import encode
from tandem.kernels.block_formats import BLOCK_FORMATS, group_format
from tandem.kernels.cpu import jit
from tandem.kernels.quantized import QuantizedWeight

# The relative error of normally distributed weights as llama.cpp quantises them, in percent, by
# ``python -m tandem.tests.kernels.llama_errors``.
ERRORS = {"Q2_K": 29.7007, "Q3_K": 15.0245, "Q4_K": 7.1486, "Q5_K": 3.5978, "Q6_K": 1.7696}


def weights(seed: int = 0) -> torch.Tensor:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(seed)) * 0.02
    weight[3], weight[4, :256], weight[5, 256:512] = 0, 0.01, 0
    return weight


def relative_error(result: torch.Tensor, weight: torch.Tensor) -> float:
    """In percent, without the rows that are not random."""
    return 100 * float((result - weight)[6:].norm() / weight[6:].norm())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_bytes_are_those_of_the_library(name: str) -> None:
    for weight in (weights(), weights(1).bfloat16().float()):
        expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
        assert torch.equal(encode(BLOCK_FORMATS[name], weight), torch.from_numpy(expected))


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_is_that_of_llama_cpp(name: str) -> None:
    """Ratios when they were last compared: Q2_K 1.0057, Q3_K 1.0000, Q4_K 1.0051, Q5_K 1.0020,
    Q6_K 0.9999."""
    format, weight = BLOCK_FORMATS[name], weights()
    result = QuantizedWeight(format, encode(format, weight)).values()
    assert relative_error(result, weight) < 1.01 * ERRORS[name]
    assert not result[3].any() and not result[5, 256:512].any()


@pytest.mark.parametrize("name", ERRORS)
def test_compiled_searches_find_the_same_bits(name: str) -> None:
    jit.prepare()
    from tandem.kernels.cpu.scale_search import COMPILED

    format, rows = BLOCK_FORMATS[name], weights(2)
    rows[7], rows[8], rows[9] = rows[7].abs(), -rows[8].abs(), rows[9] * 1e-30
    for weight in (rows, rows[:1, :256], rows.bfloat16()):
        assert torch.equal(encode(format, weight, searches=COMPILED), encode(format, weight))


def test_fp8_is_rounded_to_its_nearest_numbers() -> None:
    format, weight = group_format("e4m3", 8, 128, "F32"), weights()
    result = QuantizedWeight(format, encode(format, weight)).values()
    largest = weight.unflatten(1, (-1, 128)).abs().amax(-1).repeat_interleave(128, dim=1)
    # Half a step of three bits, or of the smallest numbers.
    assert ((result - weight).abs() <= weight.abs() / 16 * 1.001 + largest / 448 * 2**-10).all()
