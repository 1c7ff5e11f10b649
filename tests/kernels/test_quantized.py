"""Quantised weights: decoded as the ``gguf`` library decodes them, and multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from tandem.kernels.block_formats import (
    BLOCK_FORMATS,
    PACKED_FORMATS,
    Q6_K,
)
from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight, dequantize, grouped_codes
from tandem.kernels.reference import quantized_linear
from tandem.tests.support.checkpoints.gguf_files import decoded
from tandem.tests.support.random_blocks import GROUPS, random_weight

pytest.importorskip("triton")

from tandem.kernels.gpu.operators import GpuOperators

FORMATS = sorted(BLOCK_FORMATS)
IN_LIBRARY = sorted({*FORMATS} - {"Q1_0", "Q2_0"})
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("name", IN_LIBRARY)
def test_values_are_those_of_the_library_to_the_last_bit(name: str) -> None:
    """Also of blocks that no quantisation makes, with infinite scales and numbers that are none."""
    kind = BLOCK_FORMATS[name]
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (19, 50 * kind.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    weight = QuantizedWeight(kind, torch.from_numpy(data))
    assert (weight.outputs, weight.inputs) == expected.shape
    for result in (dequantize(weight), grouped_codes(weight).values()):
        same = result.numpy().view(np.int32) == expected.view(np.int32)
        assert (same | np.isnan(expected)).all()
        assert (np.isnan(result.numpy()) == np.isnan(expected)).all()


@pytest.mark.parametrize("name", sorted({*FORMATS} - {*IN_LIBRARY}))
def test_formats_that_the_library_only_names_are_those_of_their_definition(name: str) -> None:
    weight = random_weight(BLOCK_FORMATS[name], 5, 3)
    expected = torch.from_numpy(decoded(name, weight.blocks.numpy()))
    for result in (dequantize(weight), grouped_codes(weight).values()):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_is_decoded_by_itself_as_among_others(name: str) -> None:
    kind = BLOCK_FORMATS[name]
    weight = random_weight(kind, 3, 3)
    one = weight.blocks[1:2, kind.nbytes : 2 * kind.nbytes]
    expected = dequantize(weight)[1:2, kind.values : 2 * kind.values]
    assert torch.equal(dequantize(QuantizedWeight(kind, one)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_no_outputs_are_no_outputs(name: str) -> None:
    kind = BLOCK_FORMATS[name]
    weight = QuantizedWeight(kind, torch.empty(0, 2 * kind.nbytes, dtype=torch.uint8))
    assert dequantize(weight).shape == (0, 2 * kind.values)
    linear = Operators().prepare_quantized(weight, None, torch.float32)
    assert linear(torch.ones(3, 2 * kind.values)).shape == (3, 0)


def test_codes_of_few_bits_are_kept_in_halves_of_bytes() -> None:
    for kind in BLOCK_FORMATS.values():
        codes = grouped_codes(random_weight(kind, 3, 2))
        assert codes.halves == (kind in PACKED_FORMATS)
        assert codes.codes.nbytes == 3 * 2 * kind.values // (2 if codes.halves else 1)


@pytest.mark.parametrize("name", IN_LIBRARY)
def test_sizes_are_those_of_the_library(name: str) -> None:
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (BLOCK_FORMATS[name].values, BLOCK_FORMATS[name].nbytes) == (values, nbytes)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 17, 99])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_values(name: str, rows: int, dtype: torch.dtype) -> None:
    weight = random_weight(BLOCK_FORMATS[name], 99, 2)
    bias = torch.linspace(-1, 1, 99)
    x = torch.randn(rows, weight.inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    for maybe_bias in (None, bias):
        result = Operators().prepare_quantized(weight, maybe_bias, x.dtype)(x)
        expected = torch.nn.functional.linear(x.float(), dequantize(weight), maybe_bias)
        assert result.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("operators", [Operators, GpuOperators])
def test_a_product_with_groups_of_another_method_is_that_of_the_values(
    operators: Callable[[], Operators], name: str
) -> None:
    weight = random_weight(GROUPS[name], 37, 3)
    assert torch.allclose(grouped_codes(weight).values(), dequantize(weight), atol=1e-6)
    x = torch.randn(5, weight.inputs, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(weight.inputs, generator=torch.Generator().manual_seed(1))
    for source in (weight, replace(weight, order=order)):
        linear = operators().prepare_ordered(source, torch.linspace(-1, 1, 37), torch.float32)
        expected = torch.nn.functional.linear(x, dequantize(source), torch.linspace(-1, 1, 37))
        torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)
        rows = torch.tensor([36, 0, 5])
        torch.testing.assert_close(linear.rows(rows), dequantize(source)[rows])


@pytest.mark.parametrize("operators", [Operators, GpuOperators])
def test_rows_are_looked_up_in_what_is_multiplied(operators: Callable[[], Operators]) -> None:
    weight = random_weight(Q6_K, 37, 2)
    row_ids = torch.tensor([36, 0, 0, 5])
    result = operators().prepare_quantized(weight, None, torch.float32).rows(row_ids)
    assert torch.equal(result, dequantize(weight)[row_ids])


def test_outputs_are_decoded_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(Q6_K, 37, 2)
    x = torch.randn(5, weight.inputs)
    at_once = quantized_linear.DecodedLinear(weight, None)(x)
    monkeypatch.setattr(quantized_linear, "_PIECE", 4 * weight.inputs)
    torch.testing.assert_close(quantized_linear.DecodedLinear(weight, None)(x), at_once)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_strided_input_are_multiplied(name: str) -> None:
    weight = random_weight(BLOCK_FORMATS[name], 40, 1)
    wide = torch.randn(3, 2 * weight.inputs)[:, ::2]
    result = Operators().prepare_quantized(weight, None, wide.dtype)(wide)
    torch.testing.assert_close(result, wide @ dequantize(weight).T, atol=1e-4, rtol=1e-4)
