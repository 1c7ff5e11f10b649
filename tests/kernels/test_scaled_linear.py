"""Scaled products of fp8 codes, on a GPU if there is one, else as far as torch has them on CPUs,
and the choice of weights that have one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tandem.kernels.block_encoding import encode
from tandem.kernels.block_formats import Q8_0, BlockFormat, group_format
from tandem.kernels.gpu.scaled_linear import (
    ScaledLinear,
    Scaling,
    largest_error,
    multiplies,
    rounded_rows,
    scaling_of,
    weight_scales,
    works,
)
from tandem.kernels.grouped_codes import GroupedCodes
from tandem.kernels.quantized import QuantizedWeight, grouped_codes

pytest.importorskip("triton")

from tandem.kernels.gpu import scaled_linear
from tandem.kernels.gpu.operators import GpuOperators

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
ROUNDED = group_format("e4m3", 8, 128, "F32", rounds_inputs=True)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    works.cache_clear()
    yield
    works.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for an H100, and multiplies all but blocks."""
    monkeypatch.setattr(scaled_linear, "capability_of", lambda device: (9, 0))


def codes_of(outputs: int, inputs: int, scaling: Scaling) -> GroupedCodes:
    """Random codes whose scales are shared so."""
    rows, groups = -(-outputs // 128), inputs // 128
    scales = torch.rand(rows, groups).repeat_interleave(128, dim=0)[:outputs] + 0.1
    if scaling == "rows":
        scales = torch.rand(outputs, 1).expand(outputs, groups) + 0.1
    codes = torch.randn(outputs, inputs).to(DEVICE, FP8)
    return GroupedCodes(codes, scales.to(DEVICE), None, 128)


def emulated(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """torch's product of blocks, with the strides that it asks for."""
    (rows, inputs), outputs = a.shape, b.shape[1]
    groups = -(-inputs // 128)
    assert scale_a.shape == (rows, groups) and scale_a.stride() == (1, rows) and rows % 4 == 0
    assert scale_b.shape == (groups, -(-outputs // 128))
    assert scale_b.stride() == (1, -(-groups // 4) * 4) and b.stride() == (1, inputs)
    wide_a = a.float() * scale_a.repeat_interleave(128, dim=1)
    wide_b = scale_b.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)[:, :outputs]
    return (wide_a @ (b.float() * wide_b)).to(out_dtype)


@pytest.mark.parametrize("rows", [1, 19, 99])
def test_a_product_is_that_of_the_rounded_numbers(rows: int) -> None:
    codes, bias = codes_of(80, 256, "rows"), torch.randn(80, device=DEVICE)
    linear = ScaledLinear(codes, "rows", None)
    sizes = torch.logspace(-3, 3, rows)[:, None]
    x = (torch.randn(rows, 256) * sizes).to(DEVICE, torch.bfloat16)
    result = linear(x)
    assert result.dtype == torch.bfloat16
    # As vLLM rounds activations: by the largest of each row.
    scale = x.float().abs().amax(1, keepdim=True) / 448
    rounded = (x.float() / scale).clamp(-448, 448).to(FP8).float() * scale
    exact = rounded @ codes.values().t()
    worst = (result.float() - exact).abs().amax(1) / exact.abs().amax(1)
    assert worst.max() < 2**-6
    # e4m3 rounds a number by 3% in the mean, and so a product.
    error = (exact - x.float() @ codes.values().t()).norm() / exact.norm()
    assert 0.01 < error < 0.04
    biased = ScaledLinear(codes, "rows", bias)
    assert torch.equal(biased(x), result + bias.bfloat16())
    assert torch.equal(linear.rows(torch.tensor([3, 5])), codes.values()[[3, 5]])
    assert linear(x[:0]).shape == (0, 80)


def test_rows_of_zeros_stay_zeros_and_those_that_are_not_numbers_do_not_become_any() -> None:
    codes = codes_of(32, 128, "rows")
    x = torch.randn(3, 128).to(DEVICE, torch.bfloat16)
    x[0], x[1, 5] = 0, torch.nan
    result = ScaledLinear(codes, "rows", None)(x)
    assert not result[0].any() and result[1].isnan().all() and result[2].isfinite().all()


def test_a_product_of_blocks_has_a_scale_for_each_block_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", emulated)
    codes = codes_of(272, 640, "blocks")
    assert scaling_of(codes) == "blocks"
    x = torch.randn(70, 640).to(DEVICE, torch.bfloat16)
    x[:, 128:256] *= 100
    result = ScaledLinear(codes, "blocks", None)(x).float()
    groups = x.float().unflatten(1, (-1, 128))
    scale = groups.abs().amax(2, keepdim=True) / 448
    rounded = ((groups / scale).to(FP8).float() * scale).flatten(1)
    torch.testing.assert_close(result, rounded @ codes.values().t(), atol=2, rtol=2**-7)
    assert largest_error("blocks", CPU, even=False) < 0.02


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_torch_takes_the_shapes_of_each_kind(scaling: Scaling) -> None:
    """On its device without values."""
    codes = codes_of(272, 640, scaling)
    rounded, scales = rounded_rows(torch.randn(70, 640).bfloat16(), scaling)
    a, b, scale_a, scale_b = (
        each.to("meta")
        for each in (rounded, codes.codes.t(), scales, weight_scales(codes, scaling))
    )
    result = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)
    assert result.shape == (70, 272)


def test_only_scales_of_outputs_and_of_whole_blocks_have_a_product() -> None:
    assert scaling_of(codes_of(80, 256, "rows")) == "rows"
    two = [codes_of(64, 256, "rows") for _ in range(2)]
    for each in two:  # one for all, as of a checkpoint's q and k
        each.scales.copy_(each.scales[:1, :1].expand_as(each.scales))
    merged = replace(
        two[0],
        codes=torch.cat([each.codes for each in two]),
        scales=torch.cat([each.scales for each in two]),
    )
    assert scaling_of(merged) == "rows"
    blocks = codes_of(256, 256, "blocks")
    shifted = replace(blocks, scales=blocks.scales.roll(16, dims=0))
    assert (scaling_of(blocks), scaling_of(shifted)) == ("blocks", None)
    # Blocks of 64 inputs, and sizes that the tensor cores do not take.
    halves = replace(blocks, group=64, scales=torch.rand(256, 4))
    assert scaling_of(halves) is None
    for outputs, inputs in ((72, 256), (40, 128)):
        assert scaling_of(codes_of(outputs, inputs, "rows")) is None
    assert scaling_of(replace(blocks, codes=torch.zeros(256, 256, dtype=torch.int8))) is None


@pytest.mark.parametrize(
    ("capability", "rows", "blocks"),
    [
        ((0, 0), False, False),
        ((8, 0), False, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, False),
        ((12, 0), True, False),
    ],
)
def test_generations_multiply_codes_from_sm_89_on_and_blocks_on_sm_90(
    capability: tuple[int, int], rows: bool, blocks: bool
) -> None:
    assert (multiplies("rows", capability), multiplies("blocks", capability)) == (rows, blocks)


def weight_of(format: BlockFormat) -> QuantizedWeight:
    return QuantizedWeight(format, encode(format, torch.randn(32, 256)).to(DEVICE))


def test_operators_multiply_codes_where_the_checkpoint_rounds_activations(hopper: None) -> None:
    weight = weight_of(ROUNDED)
    # One scale for each output.
    codes = grouped_codes(weight)
    blocks = weight.blocks.unflatten(1, (-1, ROUNDED.nbytes))
    blocks[..., :4] = torch.full((32, 2, 1), 0.01, device=DEVICE).view(torch.uint8)
    assert scaling_of(grouped_codes(weight)) == "rows" and scaling_of(codes) is None
    operators = GpuOperators()
    x = torch.randn(70, 256).to(DEVICE, torch.bfloat16)
    linear = operators.prepare_quantized(weight, None, torch.bfloat16)
    assert isinstance(linear, ScaledLinear)
    exact = x.float() @ weight.values().t()
    assert 0.01 < (linear(x).float() - exact).norm() / exact.norm() < 0.04
    others = [
        operators.prepare_quantized(weight, None, torch.float16),
        operators.prepare_quantized(
            replace(weight, format=replace(ROUNDED, rounds_inputs=False)), None, torch.bfloat16
        ),
        operators.prepare_quantized(weight_of(Q8_0), None, torch.bfloat16),
    ]
    assert not any(isinstance(each, ScaledLinear) for each in others)


def test_without_such_a_gpu_weights_are_decoded() -> None:
    weight = QuantizedWeight(ROUNDED, weight_of(ROUNDED).blocks.cpu())
    linear = GpuOperators().prepare_quantized(weight, None, torch.bfloat16)
    assert not isinstance(linear, ScaledLinear)


def test_a_product_that_is_wrong_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: object, **__: object) -> torch.Tensor:
        return torch.ones(68, 272)

    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    assert not works("rows", CPU, even=True)
    assert "fp8 are decoded for each product: its results are" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_a_gpu_multiplies_codes(scaling: Scaling) -> None:
    device = torch.device("cuda")
    if not multiplies(scaling, scaled_linear.capability_of(device)):
        pytest.skip("this GPU has no such product")
    assert largest_error(scaling, device, even=True) < 0.02
    codes = codes_of(272, 512, scaling)
    x = torch.randn(67, 512).to(device, torch.bfloat16)
    exact = x.float() @ codes.values().t()
    result = ScaledLinear(codes, scaling, None)(x).float()
    assert result.shape == exact.shape and (result - exact).norm() / exact.norm() < 0.05
