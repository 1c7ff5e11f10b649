"""The Triton product of a few rows with an unquantised weight against torch's: on a GPU if there is
one, else as Triton interprets it. Without Triton the tests are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.tests.kernels.interpreted import interpret_as_a_gpu_computes

pytest.importorskip("triton")

from tandem.kernels.gpu import skinny_linear, skinny_trial
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.skinny_linear import ROWS, multiply, takes, warps_of

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
META = torch.device("meta")
# Relative to a result's magnitude, or to one below it. The interpreter truncates to bfloat16.
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: (2 if INTERPRETED else 1) * 2**-7}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if INTERPRETED:
        interpret_as_a_gpu_computes(monkeypatch)


def random(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x for results of magnitude 1, a weight and a bias."""
    shapes = (outputs,), (outputs, inputs), (rows, inputs)
    bias, weight, x = (torch.randn(shape).to(DEVICE, dtype) for shape in shapes)
    return x / inputs**0.5, weight, bias


def close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> None:
    assert actual.dtype == x.dtype and actual.is_contiguous()
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    limit = TOLERANCE[x.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "warps"),
    [
        (1, 16, 1024, 4),  # whole steps
        (3, 19, 8, 1),  # one vector, which most threads have not
        (8, 1, 552, 1),  # a last step that is short
        (9, 7, 1032, 4),  # two steps, and rows of another kernel
        (16, 9, 2048, 8),
    ],
)
def test_products(rows: int, outputs: int, inputs: int, warps: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(rows, outputs, inputs, dtype)
    close(multiply(x, weight, bias, warps), x, weight, bias)
    close(multiply(x, weight, None, warps), x, weight, None)


def test_rows_do_not_depend_on_others() -> None:
    x, weight, bias = random(max(ROWS), 11, 520, torch.bfloat16)
    whole = multiply(x, weight, bias, 1)
    for count in (1, 2, 8, 9):
        assert multiply(x[:count], weight, bias, 1).equal(whole[:count])


def test_nothing_is_read_beyond_rows_and_inputs() -> None:
    """What is not part of a product is not even multiplied by zero."""
    x, weight, bias = random(3, 5, 264, torch.float16)
    held = torch.full((4, 264), torch.nan, device=DEVICE, dtype=x.dtype)
    held[:3] = x
    weights = torch.full((6, 264), torch.nan, device=DEVICE, dtype=x.dtype)
    weights[:5] = weight
    biases = torch.full((6,), torch.nan, device=DEVICE, dtype=x.dtype)
    biases[:5] = bias
    assert multiply(held[:3], weights[:5], biases[:5], 1).equal(multiply(x, weight, bias, 1))


def test_what_the_kernel_takes() -> None:
    x = torch.zeros(17, 64, dtype=torch.bfloat16)
    assert takes(x[:16]) and takes(x[5:6])
    assert not takes(x) and not takes(x[:0]) and not takes(x[0])
    assert not takes(x[:4, :32]) and not takes(x.flatten()[1:65].view(1, 64))


def test_programs_share_the_memory_between_them() -> None:
    """Weights of Qwen3-0.6B and Llama-3-8B: 8 outputs of few programs are read by many warps."""
    of_small = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    assert [warps_of(*shape, META) for shape in of_small] == [4, 8, 4, 16]
    assert [warps_of(*shape, META) for shape in [(6144, 4096), (4096, 14336)]] == [4, 4]
    assert warps_of(8, 200, META) == 1


def linear_of(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    calls: list[int] = []

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x))
        return multiply(x, *rest)

    monkeypatch.setattr(skinny_trial, "works", lambda *_: True)
    monkeypatch.setattr(skinny_linear, "multiply", counted)
    return GpuOperators().prepare_linear(weight, None), calls


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_operators_multiply_few_rows_with_small_weights(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, _ = random(rows, 5, 64, torch.float16)
    linear, calls = linear_of(weight, monkeypatch)
    assert linear(x).shape == (rows, 5)
    close(linear(x), x, weight, None)
    assert calls == ([1, 1] if rows == 1 else [])
    assert linear(torch.zeros(1, 64, 128, dtype=x.dtype, device=DEVICE)[:, 0, ::2]).shape == (1, 5)


def test_other_weights_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.zeros(6, 64, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(skinny_trial, "LARGEST", half.nbytes)
    others = (
        half.float()[:3],
        half.T.contiguous()[:, :4].contiguous(),
        half[:, :32],
        half.flatten()[1:65].view(1, 64),
        torch.cat([half, half]),
    )
    for weight in others:
        linear, calls = linear_of(weight, monkeypatch)
        assert not linear(weight.new_zeros(1, weight.shape[1])).any() and not calls
    linear, calls = linear_of(half, monkeypatch)
    assert not linear(half[:1]).any() and calls


@pytest.mark.parametrize("reason", [RuntimeError("no C compiler"), "wrong"])
def test_a_kernel_that_fails_is_not_used(
    reason: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def error(*_: Any) -> float:
        if isinstance(reason, Exception):
            raise reason
        return 1.0

    monkeypatch.setattr(skinny_trial, "largest_error", error)
    monkeypatch.setattr(skinny_linear, "warps_of", lambda *_: 1)
    skinny_trial.works.cache_clear()
    assert not skinny_trial.works(5, 64, torch.bfloat16, torch.device("cuda", 0))
    skinny_trial.works.cache_clear()
    (record,) = caplog.records
    assert ("no C compiler" if isinstance(reason, Exception) else "1 off") in record.getMessage()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_trial(dtype: torch.dtype) -> None:
    for rows in ROWS:
        assert skinny_trial.largest_error(72, 1, rows, dtype, DEVICE) < 2**-6
    assert not skinny_trial.works(5, 64, dtype, torch.device("cpu"))
