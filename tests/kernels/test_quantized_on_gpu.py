"""The Triton product with quantised weights against the reference: on a GPU if there is one, else
as Triton interprets it. Without Triton it is skipped."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.block_formats import BLOCK_FORMATS, BlockFormat
from tandem.kernels.gpu.packed_codes import _moved_bits, pack, takes
from tandem.kernels.quantized import QuantizedWeight, dequantize
from tandem.tests.support.extent import selected
from tandem.tests.support.random_blocks import GROUPS, random_weight

pytest.importorskip("triton")

import triton
import triton.language as tl

from tandem.kernels.gpu import quantized_trial
from tandem.kernels.gpu.code_numbers import floats_placed, fours
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.quantized_linear import ROWS, decode, multiply
from tandem.kernels.gpu.quantized_trial import largest_error, limit, random_codes, works

MAX_ROWS = max(ROWS)
INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ALL = BLOCK_FORMATS | GROUPS
# Those of which Triton multiplies codes.
FORMATS = [name for name, kind in ALL.items() if takes(kind)]
# A format for each way in which codes become numbers; numbers are scaled alike in all of them.
IN_BFLOAT16 = selected(
    ["Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "FP8-128-F32-none", "IQ1_S", "IQ2_S", "IQ3_XXS"],
    full=FORMATS,
)
# What rounding the exact result to float16 adds, and rounding scales to it.
ROUNDED = 1e-3


def weight_of(name: str, outputs: int = 45, blocks: int | None = None) -> QuantizedWeight:
    kind = ALL[name]
    weight = random_weight(kind, outputs, blocks or (3 if kind.values < 128 else 1))
    return QuantizedWeight(kind, weight.blocks.to(DEVICE))


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in results whose largest is one."""
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", FORMATS)
def test_packed_codes_are_those_of_the_blocks(name: str) -> None:
    weight = weight_of(name)
    packed, values = pack(weight), dequantize(weight)
    row_ids = torch.tensor([[3, 44], [3, 16]], device=DEVICE)
    assert (packed.outputs, packed.inputs) == (45, weight.inputs)
    assert error(packed.part(slice(16, 45)).values(), values[16:]) < ROUNDED
    assert torch.equal(
        packed.part(row_ids.flatten()).values(), packed.part(slice(45)).values()[row_ids.flatten()]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_values(name: str) -> None:
    torch.manual_seed(0)
    weight = weight_of(name)
    for rows in (1, 19) if name in ("Q8_0", "Q2_K", "MXFP4", "IQ1_M", "IQ3_S") else (3,):
        x = torch.randn(rows, weight.inputs, device=DEVICE, dtype=torch.float16)
        expected = x.double() @ dequantize(weight).double().T
        assert error(multiply(x, pack(weight)), expected) < ROUNDED


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_decoded_to_its_values(name: str) -> None:
    weight = weight_of(name)
    packed, values = pack(weight), dequantize(weight).double()
    # The interpreter does not have the smallest numbers of bfloat16, in which e2m1 is placed.
    small = INTERPRETED and packed.numbers == "e2m1"
    wide = name in IN_BFLOAT16 and not small
    for dtype in (torch.float16, torch.bfloat16) if wide else (torch.float16,):
        result = torch.cat([decode(packed, part, dtype) for part in (slice(16), slice(16, 99))])
        assert result.dtype == dtype
        assert error(result, values) < (ROUNDED if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize(
    ("name", "blocks", "rows"), [("Q4_1", 69, 7), ("Q4_1", 69, MAX_ROWS), ("IQ2_S", 9, 7)]
)
def test_inputs_that_are_divided(name: str, blocks: int, rows: int) -> None:
    """Between programs and warps, with a chunk that is not whole."""
    weight = weight_of(name, 45, blocks)
    x = torch.randn(rows, weight.inputs, device=DEVICE, dtype=torch.float16)
    expected = x.double() @ dequantize(weight).double().T
    assert error(multiply(x, pack(weight)), expected) < ROUNDED


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q4_K", "FP8-128-F32-none", "IQ1_S", "IQ3_XXS"])
def test_a_product_in_bfloat16_differs_by_its_rounding(name: str) -> None:
    """Of codes times their scales, and of the result."""
    weight = weight_of(name)
    x = torch.randn(3, weight.inputs, device=DEVICE).bfloat16()
    expected = x.double() @ dequantize(weight).double().T
    assert error(multiply(x, pack(weight)), expected) < 2**-7


def test_floats_of_4_bits_are_bfloat16_but_for_a_factor() -> None:
    """Of which the interpreter does not have the smallest."""
    codes = torch.arange(16, dtype=torch.int16)
    bits = (codes & 7) << 6 | (codes >> 3) * -(1 << 15)
    result = bits.view(torch.bfloat16).float() * 2.0**126
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(result, torch.cat([magnitudes, -magnitudes]))


@triton.jit
def _place_all(words: tl.tensor, out: tl.tensor, BFLOAT: tl.constexpr) -> None:
    word = tl.load(words + tl.arange(0, 256)).to(tl.uint32, bitcast=True)
    DTYPE: tl.constexpr = tl.bfloat16 if BFLOAT else tl.float16
    for place in tl.static_range(4):
        placed = floats_placed(word, place, DTYPE)
        tl.store(out + place * 256 + tl.arange(0, 256), placed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_floats_of_4_bits_are_placed_from_each_part_of_a_word(dtype: torch.dtype) -> None:
    """All 256 pairs, among codes of other bits."""
    low, high = torch.arange(16).repeat(16), torch.arange(16).repeat_interleave(16)
    result = torch.empty(4, 256, dtype=torch.int32, device=DEVICE)
    others = torch.randint(0, 16, (8, 256))
    exponent = 7 if dtype == torch.bfloat16 else 10
    for place in range(4):
        codes = others.clone()
        codes[place], codes[place + 4] = low, high
        word = sum(code << 4 * number for number, code in enumerate(codes))
        assert isinstance(word, torch.Tensor)
        words = word.to(torch.uint32).view(torch.int32)
        moved = _moved_bits(words)
        assert torch.equal(_moved_bits(moved, back=True), words)
        _place_all[(1,)](moved.to(DEVICE), result, dtype == torch.bfloat16)
        expected = [(code & 7) << exponent - 1 | code >> 3 << 15 for code in (low, high)]
        halves = result[place].cpu().view(torch.uint16).view(256, 2).long().T
        assert torch.equal(halves, torch.stack(expected))


@triton.jit
def _permute(low: tl.tensor, high: tl.tensor, selectors: tl.tensor, out: tl.tensor) -> None:
    at = tl.arange(0, 4096)
    tl.store(out + at, fours(tl.load(low + at), tl.load(high + at), tl.load(selectors + at)))


def test_bytes_are_chosen_as_the_instruction_of_ptx_does() -> None:
    """``prmt`` without a mode, whose selectors are three bits of each of four: all there are."""
    low, high = torch.randint(-(1 << 31), 1 << 31, (2, 4096)).int()
    digits = [torch.arange(4096) >> 3 * place & 7 for place in range(4)]
    selectors = sum(digit << 4 * place for place, digit in enumerate(digits))
    assert isinstance(selectors, torch.Tensor)
    out = torch.empty(4096, dtype=torch.int32, device=DEVICE)
    _permute[(1,)](low.to(DEVICE), high.to(DEVICE), selectors.int().to(DEVICE), out)
    source = torch.stack([low, high], dim=1).view(torch.uint8)
    expected = torch.stack([source.gather(1, each[:, None])[:, 0] for each in digits], dim=1)
    assert torch.equal(out.cpu(), expected.contiguous().view(torch.int32)[:, 0])


def test_all_pairs_of_codes_are_looked_up() -> None:
    """Two neighbours of a word at a time, in the product with ones and zeros: each byte of a block
    has all values, in another order than its neighbours."""
    kind = BLOCK_FORMATS["IQ4_NL"]
    blocks = torch.zeros(256, kind.nbytes, dtype=torch.uint8)
    blocks[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    pairs, places = torch.arange(256)[:, None], torch.arange(16) // 2
    blocks[:, 2:] = ((pairs + 37 * places) % 256).to(torch.uint8)
    weight = QuantizedWeight(kind, blocks.to(DEVICE))
    x = torch.eye(32, dtype=torch.float16, device=DEVICE)
    assert torch.equal(multiply(x, pack(weight)).T.float(), dequantize(weight).float())


def test_a_row_is_the_same_beside_others() -> None:
    weight = pack(weight_of("Q4_K", 20, blocks=5))
    x = torch.randn(3, weight.inputs, device=DEVICE, dtype=torch.float16)
    together = multiply(x, weight)
    for row in (0, 2):
        assert torch.equal(multiply(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize(("name", "rows"), [("Q4_K", 8), ("MXFP4", 16)])
def test_the_trial_passes(name: str, rows: int) -> None:
    error = largest_error(ALL[name], torch.float16, DEVICE, rows)
    assert 0 <= error < limit(torch.float16)


def test_the_trial_has_a_codebook() -> None:
    generator = torch.Generator().manual_seed(0)
    packed, values = random_codes(BLOCK_FORMATS["IQ2_XS"], DEVICE, generator)
    assert error(packed.part(slice(None)).values(), values) < ROUNDED


def test_one_row_of_which_a_part_is_multiplied() -> None:
    """Its memory may begin anywhere."""
    weight = weight_of("Q8_0")
    x = torch.randn(1, 3 + weight.inputs, device=DEVICE, dtype=torch.float16)[:, 3:]
    expected = x.double() @ dequantize(weight).double().T
    assert error(multiply(x, pack(weight)), expected) < ROUNDED


def test_a_product_that_is_wrong_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = BLOCK_FORMATS["Q8_0"]
    attempts: list[tuple[str, int]] = []

    def some(kind: BlockFormat, dtype: torch.dtype, device: torch.device, rows: int) -> float:
        attempts.append((kind.name, rows))
        return 0.9 if rows == wrong else 0.0

    monkeypatch.setattr(quantized_trial, "largest_error", some)
    for wrong in (0, MAX_ROWS):
        works.cache_clear()
        assert works(kind, torch.float16, torch.device("cuda")) == (wrong == 0)
        assert bool(caplog.text) == (wrong != 0)
    assert "Q8_0 is decoded for each product, because of Triton: its results are" in caplog.text
    assert attempts == 2 * [(kind.name, rows) for rows in (*ROWS, MAX_ROWS + 1)]
    assert not works(kind, torch.float16, torch.device("cpu"))
    assert not works(kind, torch.float32, torch.device("cuda"))
    assert not works(GROUPS["FP8-40-F32-none"], torch.float16, torch.device("cuda"))
    works.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, MAX_ROWS + 1])
@pytest.mark.parametrize("name", ["Q4_1", "IQ4_NL", "Q6_K", "IQ2_XXS"])
def test_operators_take_any_number_of_rows(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_of(name)
    bias = torch.linspace(-1, 1, 45, device=DEVICE)
    monkeypatch.setattr(quantized_trial, "works", lambda *_: True)
    x = torch.randn(rows, weight.inputs, device=DEVICE, dtype=torch.float16)
    product = GpuOperators().prepare_quantized(weight, bias, x.dtype)
    expected = torch.nn.functional.linear(x.float(), dequantize(weight), bias)
    torch.testing.assert_close(product(x).float(), expected, atol=2e-2, rtol=5e-3)
    row_ids = torch.tensor([7, 44, 7], device=DEVICE)
    torch.testing.assert_close(
        product.rows(row_ids), dequantize(weight)[row_ids], atol=1e-3, rtol=1e-3
    )


def test_a_gpu_says_which_formats_it_multiplies() -> None:
    """Activations are of half types."""
    gpu, kind = GpuOperators(), BLOCK_FORMATS["Q4_K"]
    assert gpu.has_product(kind, torch.bfloat16) and gpu.has_product(kind, torch.float16)
    assert not gpu.has_product(kind, torch.float32)
