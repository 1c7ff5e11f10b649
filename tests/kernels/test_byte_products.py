"""Products of int8 activations with weights in panels: the same numbers as an emulation of their
rounding has, in any batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch

from tandem.kernels.block_formats import (
    BF16,
    BLOCK_FORMATS,
    CODEBOOK_FORMATS,
    Q4_0,
    Q4_1,
    Q6_K,
    Q8_0,
    group_format,
)
from tandem.kernels.cpu import jit
from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight, dequantize
from tandem.kernels.reference.quantized_linear import DecodedLinear
from tandem.tests.support.random_blocks import GROUPS, random_weight
from tandem.tests.support.rounded_operators import rounded, rounded_for

jit.prepare()

from tandem.kernels.cpu import byte_products, operators  # noqa: E402
from tandem.kernels.cpu.block_layouts import (  # noqa: E402
    BLOCK,
    LANES,
    Layout,
    Panels,
    has_layout,
    layout_of,
)
from tandem.kernels.cpu.block_packing import pack, tables_of  # noqa: E402
from tandem.kernels.cpu.byte_products import PanelLinear  # noqa: E402
from tandem.kernels.cpu.byte_tile import Tile  # noqa: E402
from tandem.kernels.cpu.narrow_tile import NarrowTile, ShortTile  # noqa: E402
from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402
from tandem.kernels.cpu.panel_rows import PanelRows  # noqa: E402

KINDS = {name: kind for name, kind in (BLOCK_FORMATS | GROUPS).items() if layout_of(kind)}
FORMATS = sorted(KINDS)
OUTPUTS, INPUTS = 99, 512
# What panels have in whole bytes, or as fp16, and the file in fewer bits.
WIDER = {
    "Q3_K": 4 / 110,
    "Q4_K": 4 / 144,
    "Q5_K": 4 / 176,
    "IQ4_XS": 2 / 136,
    "NVFP4": 4 / 36,
    "TQ1_0": 12 / 54,
    "IQ1_S": 8 / 50,
    "IQ1_M": 2 / 56,
    "IQ2_XXS": 8 / 66,
    "IQ2_XS": 8 / 74,
    "IQ3_XXS": 8 / 98,
    "IQ3_S": 4 / 110,
}
in_lines = pytest.mark.skipif(not jit.multiplies_lines(), reason="the CPU has no AVX-512 VNNI")
multiplies = pytest.mark.skipif(not jit.multiplies_bytes(), reason="the CPU has no AVX2")


def weight_of(name: str, outputs: int = OUTPUTS) -> QuantizedWeight:
    kind = KINDS[name]
    return random_weight(kind, outputs, INPUTS // kind.values)


@cache
def product(name: str) -> PanelLinear:
    return PanelLinear(weight_of(name), torch.linspace(-1, 1, OUTPUTS))


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Of several sizes, with outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    x[:, 3::97] *= 20
    return x * torch.logspace(-6, 6, count)[:, None] if count > 1 else x


def known_layout(name: str) -> Layout:
    layout = layout_of(KINDS[name])
    assert layout is not None
    return layout


def panels_of(name: str, outputs: int) -> Panels:
    layout = known_layout(name)
    size = layout.sections(-(-outputs // LANES), INPUTS // BLOCK)[-1]
    return Panels(layout, torch.empty(size, dtype=torch.uint8), outputs, INPUTS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outputs", [1, 37])
@pytest.mark.parametrize("fill", [Panels.fill, pack])
def test_rows_of_panels_are_those_of_the_blocks(
    name: str, outputs: int, fill: Callable[[Panels, QuantizedWeight], None]
) -> None:
    weight, panels = weight_of(name, outputs), panels_of(name, outputs)
    fill(panels, weight)
    row_ids = torch.arange(outputs).flip(0).repeat(2)
    for rows in (panels.rows(row_ids), PanelRows(panels)(row_ids)):
        assert torch.equal(rows, dequantize(weight)[row_ids])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("outputs", [16, 37])
def test_packing_is_that_of_torch(name: str, outputs: int) -> None:
    """To the byte, but for scales whose factor is zero, of which torch makes zeros."""
    weight = weight_of(name, outputs)
    supers = known_layout(name).supers
    if supers and KINDS[name] not in CODEBOOK_FORMATS:
        blocks = weight.blocks.view(outputs, -1, weight.format.nbytes)
        blocks[..., [at + 1 for at in supers]] |= 4
    result, expected = panels_of(name, outputs), panels_of(name, outputs)
    pack(result, weight)
    expected.fill(weight)
    for ours, theirs in zip(result.sections(), expected.sections(), strict=True):
        whole = outputs // LANES
        assert torch.equal(ours[:whole], theirs[:whole])
        assert torch.equal(ours[whole:, :, : outputs % LANES], theirs[whole:, :, : outputs % LANES])


@pytest.mark.parametrize("name", FORMATS)
def test_only_what_has_to_be_computed_is_left_to_torch(name: str) -> None:
    is_plain = [moves is None for moves in tables_of(KINDS[name], known_layout(name)).sections]
    assert is_plain == [name == "TQ1_0", name == "NVFP4", False, False]


@pytest.mark.parametrize("name", FORMATS)
def test_panels_are_no_larger_than_the_file(name: str) -> None:
    kind = KINDS[name]
    layout = known_layout(name)
    size = layout.sections(4096 // LANES, 4096 // BLOCK)[-1]
    limit = kind.bytes_of(4096 * 4096) * (1 + WIDER.get(name, 0))
    assert size <= round(limit) + 64 * layout.level_bytes + 2 * layout.book


@multiplies
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_rounded_rows(name: str) -> None:
    values, bias = dequantize(weight_of(name)).double(), torch.linspace(-1, 1, OUTPUTS).double()
    for count in (1, 2, 3, 5, 7, 11, 13, 37):
        x = rows(count, seed=count)
        result = product(name)(x).double()
        inputs = rounded_for(weight_of(name), x)
        expected = inputs @ values.T + bias
        size = inputs.abs() @ values.abs().T + bias.abs()
        # The numbers of nf4 are rounded to 16 bits.
        tolerance = 2.0**-15 if name.startswith("NF4") else 1e-6
        assert ((result - expected).abs() <= tolerance * size).all()
        exact = x.double() @ values.T + bias
        assert ((result - exact).norm(dim=1) <= 0.03 * (exact - bias).norm(dim=1) + 1e-6).all()


@multiplies
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_product_in_any_batch(name: str) -> None:
    x = rows(40)
    whole = product(name)(x)
    for first, end in ((0, 1), (1, 3), (3, 6), (6, 11), (11, 18), (18, 28), (28, 40), (5, 30)):
        assert torch.equal(product(name)(x[first:end]), whole[first:end])


@multiplies
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_what_is_no_number_stays_visible_in_its_row_alone(
    name: str, count: int, bad: float
) -> None:
    x = rows(count)
    clean = product(name)(x)
    x[count // 2, 77] = bad
    result = product(name)(x)
    wrong = torch.zeros(count, dtype=torch.bool)
    wrong[count // 2] = True
    assert not result[wrong].isfinite().any()
    assert torch.equal(result[~wrong], clean[~wrong])


@multiplies
@pytest.mark.parametrize("newest", [True, False])
def test_each_float_of_8_bits_is_itself(newest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without instructions for bf16; a row with a code for NaN is NaN."""
    if newest and not (jit.multiplies_pairs() and jit.moves_bits()):
        pytest.skip("the CPU does not multiply bf16")
    monkeypatch.setattr(byte_products, "multiplies_pairs", lambda: newest)
    codes = torch.arange(256, dtype=torch.uint8)[
        torch.tensor([*range(127), *range(128, 255), 0, 0])
    ]
    scales = torch.ones(2, 1).view(torch.uint8)
    blocks = torch.cat([torch.cat([scales, half.expand(2, -1)], 1) for half in codes.split(128)], 1)
    blocks[1, 7] = 0x7F
    product = PanelLinear(QuantizedWeight(group_format("e4m3", 8, 128, "F32"), blocks), None)
    result = product(torch.eye(256))
    assert torch.equal(result[:, 0], codes.view(torch.float8_e4m3fn).float())
    assert result[:, 1].isnan().any()
    x = torch.randn(23, 256, generator=torch.Generator().manual_seed(0))
    values = codes.view(torch.float8_e4m3fn).double()
    expected = (x.bfloat16() if newest else x).double() @ values
    whole = product(x)
    torch.testing.assert_close(whole[:, 0].double(), expected, atol=0.01, rtol=1e-5)
    for first, end in ((0, 1), (1, 3), (3, 9), (9, 23)):
        assert torch.equal(product(x[first:end])[:, 0], whole[first:end, 0])


@multiplies
@pytest.mark.parametrize("outputs", [16, 37])
@pytest.mark.parametrize("newest", [True, False])
def test_numbers_in_bf16_are_multiplied_in_panels(
    outputs: int, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if newest and not jit.multiplies_pairs():
        pytest.skip("the CPU does not multiply bf16")
    monkeypatch.setattr(byte_products, "multiplies_pairs", lambda: newest)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(outputs, 2 * BLOCK, generator=generator).bfloat16()
    weight = QuantizedWeight(BF16, numbers.view(torch.uint8))
    layout = layout_of(BF16)
    assert layout is not None
    size = layout.sections(-(-outputs // LANES), 2)[-1]
    result, expected = (
        Panels(layout, torch.zeros(size, dtype=torch.uint8), outputs, 2 * BLOCK) for _ in range(2)
    )
    pack(result, weight)
    expected.fill(weight)
    assert torch.equal(result.sections()[0], expected.sections()[0])
    bias = torch.linspace(-1, 1, outputs)
    product = PanelLinear(weight, bias)
    row_ids = torch.arange(outputs).flip(0)
    assert torch.equal(product.rows(row_ids), numbers[row_ids].float())
    x = torch.randn(37, 2 * BLOCK, generator=generator)
    values = (x.bfloat16() if newest else x).double() @ numbers.double().T + bias.double()
    whole = product(x)
    torch.testing.assert_close(whole.double(), values, atol=1e-5, rtol=1e-5)
    for first, end in ((0, 1), (1, 3), (3, 9), (9, 36)):
        assert torch.equal(product(x[first:end]), whole[first:end])


@in_lines
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Q6_K", NarrowTile),
        ("Q6_K", ShortTile),
        ("Q8_0", ShortTile),
        ("Q2_K", ShortTile),
        ("NF4-64-F32-none", NarrowTile),
        ("NF4-64-F32-none", ShortTile),
        ("IQ1_M", ShortTile),
        ("IQ2_S", NarrowTile),
        ("IQ2_S", ShortTile),
        ("IQ3_S", ShortTile),
    ],
)
def test_narrower_registers_have_the_same_bits(
    name: str, kind: type[Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for each in (byte_products.tile_of(known_layout(name)), kind):
        monkeypatch.setattr(byte_products, "tile_of", lambda layout, each=each: each)
        product, extremes = PanelLinear(weight_of(name), torch.linspace(-1, 1, OUTPUTS)), rows(4)
        extremes[0], extremes[1], extremes[2, 77] = 127, -127, torch.nan
        inputs = [rows(1), rows(2), rows(3), extremes, rows(37)]
        results.append(torch.cat([product(x) for x in inputs]))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


HASWELL = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
    "ATEN_CPU_CAPABILITY": "avx2",
}
MULTIPLY = """
from tandem.tests.kernels.test_byte_products import byte_products, jit, known_layout, product, rows
assert not jit.WIDE and byte_products.tile_of(known_layout("Q4_K")).__name__ == "ShortTile"
print([product(name)(rows(7)).tolist() for name in ("Q4_K", "IQ2_XXS", "FP8-128-F32-none")])
"""


@multiplies
def test_a_cpu_with_avx2_has_the_same_bits() -> None:
    """Except for floats, before which it does not round activations."""
    command = [sys.executable, "-P", "-c", MULTIPLY]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | HASWELL
    )
    assert process.returncode == 0, process.stderr[-3000:]
    plain, of_book, floats = map(torch.tensor, json.loads(process.stdout))
    assert torch.equal(plain, product("Q4_K")(rows(7)))
    assert torch.equal(of_book, product("IQ2_XXS")(rows(7)))
    values = dequantize(weight_of("FP8-128-F32-none")).double()
    exact = rows(7).double() @ values.T + torch.linspace(-1, 1, OUTPUTS).double()
    assert ((floats - exact).norm(dim=1) <= 1e-6 * exact.norm(dim=1)).all()


def test_a_backend_says_which_formats_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of the format is then multiplied by a kernel, and any other one decoded."""
    compiled = CompiledOperators()
    for has_bytes in sorted({jit.multiplies_bytes(), False}, reverse=True):
        monkeypatch.setattr(operators, "multiplies_bytes", lambda has=has_bytes: has)
        for name in ("Q8_0", "IQ2_S"):
            kind = BLOCK_FORMATS[name]
            weight = random_weight(kind, OUTPUTS, INPUTS // kind.values)
            product = compiled.prepare_quantized(weight, None, torch.float32)
            assert isinstance(product, DecodedLinear) != has_bytes
            assert compiled.has_product(kind, torch.float32) == has_bytes
    assert not Operators().has_product(BLOCK_FORMATS["Q8_0"], torch.float32)


def test_rows_may_be_strided() -> None:
    wide = rows(3).repeat_interleave(2, 1)[:, ::2]
    assert not wide.is_contiguous()
    assert product("Q4_K")(wide).equal(product("Q4_K")(rows(3)))


def test_other_widths_have_no_panels() -> None:
    assert not has_layout(random_weight(group_format("e2m1", 4, 16, "F32"), 3, 3))
    assert not has_layout(random_weight(group_format("int", 4, 40, "F16"), 3, 4))
    assert not has_layout(random_weight(group_format("e4m3", 8, 16, "F32"), 3, 4))


@multiplies
def test_rows_are_looked_up_in_panels() -> None:
    row_ids = torch.tensor([98, 0, 0, 17])
    assert torch.equal(product("Q6_K").rows(row_ids), dequantize(weight_of("Q6_K"))[row_ids])


@multiplies
def test_zeros_and_denormals_are_multiplied() -> None:
    x = torch.zeros(3, INPUTS)
    x[1] = 1e-40
    x[2] = 3e38
    result = product("Q4_0")(x)
    assert torch.equal(result[:2], torch.linspace(-1, 1, OUTPUTS).expand(2, -1))
    assert (result[2].abs() > 1e30).any()


@multiplies
@pytest.mark.parametrize("code", [-128, 127])
def test_the_largest_products_fit(code: int) -> None:
    block = torch.tensor([0x00, 0x3C, *[code % 256] * BLOCK], dtype=torch.uint8)  # scaled by 1
    weight = QuantizedWeight(Q8_0, block.repeat(OUTPUTS, INPUTS // BLOCK))
    signs = torch.tensor([1.0, -1.0])[:, None]
    result = PanelLinear(weight, None)(signs.expand(2, INPUTS))
    torch.testing.assert_close(result, (code * INPUTS * signs).expand(2, OUTPUTS))


@multiplies
@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 40])
def test_any_number_of_outputs(kind: object, outputs: int) -> None:
    weight = weight_of(kind.name, outputs)  # type: ignore[attr-defined]
    result = PanelLinear(weight, None)(rows(3))
    expected = rounded(rows(3)) @ dequantize(weight).double().T
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-6 * 1e6)
    assert result.shape == (3, outputs)


@multiplies
def test_no_rows_and_other_types() -> None:
    assert product("Q4_0")(torch.empty(0, INPUTS)).shape == (0, OUTPUTS)
    x = rows(5).bfloat16()
    result = product("Q4_0")(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, product("Q4_0")(x.float()).bfloat16())
    wide = torch.randn(3, 2 * INPUTS)[:, ::2]
    assert torch.equal(product("Q4_0")(wide), product("Q4_0")(wide.contiguous()))
