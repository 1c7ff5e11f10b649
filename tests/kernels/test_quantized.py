"""Quantised weights: decoded as the ``gguf`` library decodes them, and multiplied."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tandem.kernels.block_formats import BLOCK_FORMATS, Q6_K, BlockFormat
from tandem.kernels.cpu import jit
from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight, dequantize, grouped_codes
from tandem.kernels.reference import quantized_linear

FORMATS = sorted(BLOCK_FORMATS)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def compiled_operators() -> Operators:
    jit.prepare()
    from tandem.kernels.cpu.operators import CompiledOperators

    return CompiledOperators()


def random_weight(kind: BlockFormat, outputs: int, blocks: int, seed: int = 0) -> QuantizedWeight:
    """Any bytes, with scales of a weight's size."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (outputs, blocks, kind.nbytes), dtype=np.uint8)
    # Q6_K's scale is last and multiplies others.
    at, size = (208, 2e-4) if kind is Q6_K else (0, 1e-2)
    for place in (at, 2) if kind.name == "Q4_1" else (at,):
        scales = (generator.standard_normal((outputs, blocks, 1)) * size).astype(np.float16)
        data[..., place : place + 2] = scales.view(np.uint8)
    return QuantizedWeight(kind, torch.from_numpy(data.reshape(outputs, -1)))


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_library(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_FORMATS[name]
    weight = random_weight(kind, 19, 3)
    expected = gguf.quants.dequantize(weight.blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert weight.inputs == expected.shape[1]
    assert torch.equal(dequantize(weight), torch.from_numpy(expected))
    assert torch.equal(dequantize(weight), grouped_codes(weight).values())


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_the_library(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (BLOCK_FORMATS[name].values, BLOCK_FORMATS[name].nbytes) == (values, nbytes)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 99])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("operators", [Operators, compiled_operators])
def test_a_product_is_that_of_the_values(
    operators: Callable[[], Operators], name: str, rows: int, dtype: torch.dtype
) -> None:
    weight = random_weight(BLOCK_FORMATS[name], 99, 2)
    bias = torch.linspace(-1, 1, 99)
    x = torch.randn(rows, weight.inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    for given in (None, bias):
        found = operators().prepare_quantized(weight, given, x.dtype)(x)
        expected = torch.nn.functional.linear(x.float(), dequantize(weight), given)
        assert found.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_outputs_are_decoded_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(Q6_K, 37, 2)
    x = torch.randn(5, weight.inputs)
    at_once = quantized_linear.prepare_quantized(weight, None, x.dtype)(x)
    monkeypatch.setattr(quantized_linear, "_PIECE", 4 * weight.inputs)
    torch.testing.assert_close(
        quantized_linear.prepare_quantized(weight, None, x.dtype)(x), at_once
    )


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_strided_input_are_multiplied(name: str) -> None:
    weight = random_weight(BLOCK_FORMATS[name], 40, 1)
    wide = torch.randn(3, 2 * weight.inputs)[:, ::2]
    found = compiled_operators().prepare_quantized(weight, None, wide.dtype)(wide)
    torch.testing.assert_close(found, wide @ dequantize(weight).T, atol=1e-4, rtol=1e-4)
