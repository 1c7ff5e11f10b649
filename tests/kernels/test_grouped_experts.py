"""Experts whose weights stay quantised, together and one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.kernels.block_formats import Q4_0, Q4_1, Q6_K, Q8_0, BlockFormat
from tandem.kernels.cpu import jit
from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight, dequantize
from tandem.kernels.reference.experts import LoopedExperts
from tandem.kernels.signatures import Experts
from tandem.tests.support.random_blocks import GROUPS, random_weight

jit.prepare()

from tandem.kernels.cpu import byte_products  # noqa: E402
from tandem.kernels.cpu.grouped_experts import GroupedExperts  # noqa: E402
from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402

HIDDEN, WIDTH, EXPERTS, TOP_K = 512, 256, 9, 3
multiplies = pytest.mark.skipif(not jit.multiplies_bytes(), reason="the CPU has no AVX2")
# Formats of gate, up and down.
ALIKE = Q4_0, Q4_0, Q4_0
MIXED = Q4_1, Q8_0, Q6_K
OF_GROUPS = tuple(
    GROUPS[name] for name in ("INT4-128-F16-zero", "FP8-128-F32-none", "NF4-64-F32-none")
)


def some_weight(kind: BlockFormat, outputs: int, inputs: int, seed: int) -> QuantizedWeight:
    return random_weight(kind, outputs, inputs // kind.values, seed)


def weights_of(kinds: tuple[BlockFormat, ...]) -> tuple[list[Any], list[Any]]:
    gate, up, down = kinds
    gate_up: list[Any] = []
    for seed in range(EXPERTS):
        if gate == up:
            gate_up.append((some_weight(gate, 2 * WIDTH, HIDDEN, seed),))
        else:
            runs = [some_weight(kind, WIDTH, HIDDEN, seed) for kind in (gate, up)]
            gate_up.append(tuple(runs))
    return gate_up, [(some_weight(down, HIDDEN, WIDTH, 99 + seed),) for seed in range(EXPERTS)]


def biases_of(kinds: tuple[BlockFormat, ...]) -> tuple[list[torch.Tensor], ...] | tuple[()]:
    """Of all mixtures of different formats."""
    if kinds == ALIKE:
        return ()
    generator = torch.Generator().manual_seed(5)
    return tuple(
        list(torch.randn(EXPERTS, width, generator=generator)) for width in (2 * WIDTH, HIDDEN)
    )


def prepared(operators: Operators, kinds: tuple[BlockFormat, ...], dtype: torch.dtype) -> Experts:
    gate_up, down = weights_of(kinds)
    experts = operators.prepare_experts(gate_up, down, "silu", dtype, *biases_of(kinds))
    assert gate_up == down == []
    return experts


def routed(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator)
    scores = torch.rand(rows, EXPERTS, generator=generator)
    scores[:, 4] = 0  # an expert without rows
    weights, expert_ids = scores.topk(TOP_K, sorted=False)
    return x, weights, expert_ids


def expected(kinds: tuple[BlockFormat, ...], rows: int) -> torch.Tensor:
    gate_up, down = weights_of(kinds)
    nothing = [torch.zeros(1)] * EXPERTS
    first, second = biases_of(kinds) or (nothing, nothing)
    x, weights, expert_ids = routed(rows)
    out = torch.zeros(rows, HIDDEN)
    for row in range(rows):
        for weight, expert in zip(weights[row], expert_ids[row], strict=True):
            both = torch.cat([dequantize(run) for run in gate_up[expert]])
            gate, up = (both @ x[row] + first[expert]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            values = dequantize(down[expert][0])
            out[row] += weight * (values @ hidden + second[expert])
    return out


@pytest.mark.parametrize("kinds", [ALIKE, MIXED, OF_GROUPS], ids=["alike", "mixed", "groups"])
@pytest.mark.parametrize(
    ("operators", "error"),
    [(Operators, 1e-5), pytest.param(CompiledOperators, 0.03, marks=multiplies)],
)
def test_results_are_weighted_and_added(
    operators: Callable[[], Operators], error: float, kinds: tuple[BlockFormat, ...]
) -> None:
    experts = prepared(operators(), kinds, torch.float32)
    for rows in (1, 3, 70):
        start = torch.linspace(-1, 1, HIDDEN).repeat(rows, 1)
        out, change = start.clone(), expected(kinds, rows)
        experts(*routed(rows), out)
        assert ((out - start - change).norm(dim=1) <= error * change.norm(dim=1)).all()


@multiplies
def test_floats_of_8_bits_are_exact_without_instructions_for_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(byte_products, "multiplies_pairs", lambda: False)
    kinds = (OF_GROUPS[1],) * 3
    experts = prepared(CompiledOperators(), kinds, torch.float32)
    for rows in (1, 70):
        out, change = torch.zeros(rows, HIDDEN), expected(kinds, rows)
        experts(*routed(rows), out)
        assert ((out - change).norm(dim=1) <= 1e-5 * change.norm(dim=1)).all()


@multiplies
@pytest.mark.parametrize("kinds", [ALIKE, MIXED, OF_GROUPS], ids=["alike", "mixed", "groups"])
def test_a_row_has_the_same_result_in_any_batch(kinds: tuple[BlockFormat, ...]) -> None:
    experts = prepared(CompiledOperators(), kinds, torch.float32)
    assert isinstance(experts, GroupedExperts)
    x, weights, expert_ids = routed(70)
    whole = torch.zeros_like(x)
    experts(x, weights, expert_ids, whole)
    for first, end in ((0, 1), (1, 4), (4, 30), (30, 70)):
        part = torch.zeros(end - first, HIDDEN)
        experts(x[first:end], weights[first:end], expert_ids[first:end], part)
        assert torch.equal(part, whole[first:end])
    x[33, 5] = torch.nan
    out = torch.zeros_like(x)
    experts(x, weights, expert_ids, out)
    assert out[33].isnan().all()
    others = torch.arange(70) != 33
    assert torch.equal(out[others], whole[others])


@multiplies
def test_activations_of_half_types_and_no_rows() -> None:
    experts = prepared(CompiledOperators(), ALIKE, torch.bfloat16)
    x, weights, expert_ids = routed(7)
    wide, narrow = torch.zeros_like(x), torch.zeros_like(x).bfloat16()
    experts(x.bfloat16().float(), weights, expert_ids, wide)
    experts(x.bfloat16(), weights, expert_ids, narrow)
    assert torch.equal(narrow, wide.bfloat16())
    experts(x[:0], weights[:0], expert_ids[:0], wide[:0])


@multiplies
def test_experts_of_different_formats_are_computed_one_by_one() -> None:
    gate_up, down = weights_of(ALIKE)
    gate_up[2] = weights_of((Q8_0, Q8_0, Q4_0))[0][2]
    down[5] = (dequantize(down[5][0]),)
    experts = CompiledOperators().prepare_experts(gate_up, down, "silu", torch.float32)
    assert isinstance(experts, LoopedExperts)
    out, reference = torch.zeros(3, HIDDEN), torch.zeros(3, HIDDEN)
    experts(*routed(3), out)
    gate_up, down = weights_of(ALIKE)
    gate_up[2] = weights_of((Q8_0, Q8_0, Q4_0))[0][2]
    Operators().prepare_experts(gate_up, down, "silu", torch.float32)(*routed(3), reference)
    assert ((out - reference).norm(dim=1) <= 0.03 * reference.norm(dim=1)).all()
