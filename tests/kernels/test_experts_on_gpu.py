"""Experts computed together by Triton: on a GPU if there is one, else as Triton interprets it.
Without Triton it is skipped."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.activations import Activation
from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.kernels.gpu.packed_codes import pack, stack_packed
from tandem.kernels.gpu.row_blocks import RowBlocks, row_blocks
from tandem.kernels.operators import Operators
from tandem.kernels.quantized import QuantizedWeight, dequantize
from tandem.kernels.reference.experts import LoopedExperts
from tandem.kernels.signatures import Weight
from tandem.tests.support.random_blocks import random_weight

pytest.importorskip("triton")

from tandem.kernels.gpu import grouped_experts, grouped_product, quantized_linear, row_plan
from tandem.kernels.gpu.grouped_experts import TritonExperts, largest_error
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.quantized_trial import limit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SILU: Activation = "silu"
HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 48, 5, 3


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_each_row_is_in_a_block_of_each_of_its_experts(rows: int, top_k: int) -> None:
    torch.manual_seed(0)
    choices = torch.rand(rows, EXPERTS).topk(top_k).indices
    plan = row_blocks(choices, EXPERTS, [8, 32])
    pairs = set()
    for expert, first, count in plan.blocks.tolist():
        assert 0 <= count <= plan.rows
        for place in range(first, first + count):
            row = int(plan.sources[place])
            pairs.add((row, expert))
            assert plan.owners[place] == expert
            assert place in plan.places[row]
            assert choices[row, plan.places[row].tolist().index(place)] == expert
    assert pairs == {(row, int(expert)) for row in range(rows) for expert in choices[row]}
    assert plan.of_products().sources.tolist() == list(range(rows * top_k))


def test_blocks_have_more_rows_where_experts_do() -> None:
    for rows, size in ((1, 8), (8, 8), (64, 32), (4096, 64)):
        assert row_blocks(torch.zeros(rows, 1, dtype=torch.int64), 4, [8, 32, 64]).rows == size


def test_numbers_of_blocks_depend_on_numbers_of_rows_alone() -> None:
    even, one = torch.arange(64).view(32, 2) % 16, torch.tensor([[3, 4]]).expand(32, 2)
    assert row_blocks(even, 16, [8]).blocks.shape == row_blocks(one, 16, [8]).blocks.shape


@pytest.mark.parametrize("experts", [EXPERTS, 70])
@pytest.mark.parametrize("rows", [1, 30, 700])
@pytest.mark.parametrize("max_programs", [row_plan._PROGRAMS, 2])
def test_a_plan_in_one_launch_is_the_one_of_many(
    rows: int, experts: int, max_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one program or several, which take one step or several; rows keep their order."""
    torch.manual_seed(0)
    monkeypatch.setattr(row_plan, "_PROGRAMS", max_programs)
    scores = torch.rand(rows, experts) * torch.linspace(0.5, 1, experts)
    choices = scores.topk(TOP_K + 1, sorted=False).indices[:, 1:].to(DEVICE)
    result = row_plan.plan_rows(choices, experts, [8, 32, 64])
    expected = row_blocks(choices, experts, [8, 32, 64])
    for name in RowBlocks.__slots__:
        one, other = getattr(result, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, atol=0, rtol=0)
        else:
            assert one == other


def test_a_plan_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "_TRIAL_ROWS", (3, 30))
    assert grouped_experts.first_difference(EXPERTS, DEVICE) == ""
    monkeypatch.setattr(row_plan, "rows_of_a_block", lambda *_: 7)
    difference = grouped_experts.first_difference(EXPERTS, DEVICE)
    assert difference == "blocks of their rows differ"


def test_sizes_have_kernels_of_both_kinds() -> None:
    assert set(grouped_product.ROWS) <= set(quantized_linear.ROWS)


@pytest.mark.parametrize(("name", "rows"), [("Q4_K", 8), (None, 8), (None, 32)])
def test_the_trial_passes(name: str | None, rows: int) -> None:
    kind = None if name is None else BLOCK_FORMATS[name]
    assert 0 <= largest_error(kind, torch.float16, DEVICE, rows) < limit(torch.float16)


def weights_of(name: str | None, outputs: int, inputs: int) -> list[Weight]:
    if name is None:
        scale = inputs**-0.5
        shape = (EXPERTS, outputs, inputs)
        return [(each.half().to(DEVICE),) for each in torch.randn(shape) * scale]
    kind = BLOCK_FORMATS[name]
    blocks = random_weight(kind, EXPERTS * outputs, inputs // kind.values).blocks.to(DEVICE)
    return [(QuantizedWeight(kind, each),) for each in blocks.view(EXPERTS, outputs, -1)]


def dense(weights: list[Weight]) -> list[Weight]:
    return [
        (dequantize(run).half() if isinstance(run, QuantizedWeight) else run,) for (run,) in weights
    ]


@pytest.mark.parametrize("name", [None, "Q8_0", "Q4_1"])
@pytest.mark.parametrize("rows", [0, 3, 30])
def test_experts_are_those_of_the_loop(
    name: str | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(grouped_experts, "works", lambda *_: True)
    width = 64 if name else WIDTH
    gate_up, down = weights_of(name, 2 * width, HIDDEN), weights_of(name, HIDDEN, width)
    biases = [list(torch.randn(EXPERTS, n, device=DEVICE).half()) for n in (2 * width, HIDDEN)]
    dense_up, dense_down = dense(gate_up), dense(down)
    together = GpuOperators().prepare_experts(gate_up, down, SILU, torch.float16, *biases)
    one_by_one = Operators().prepare_experts(dense_up, dense_down, SILU, torch.float16, *biases)
    assert isinstance(together, TritonExperts) and not gate_up and not down
    x = (torch.randn(rows, HIDDEN) * 0.1).half().to(DEVICE)
    shares = torch.rand(rows, TOP_K, device=DEVICE)
    expert_ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices.to(DEVICE)
    result, expected = (torch.ones(rows, HIDDEN, device=DEVICE).half() for _ in range(2))
    assert together(x, shares, expert_ids, result) is result
    assert one_by_one(x, shares, expert_ids, expected) is expected
    fresh, zeros = (each(x, shares, expert_ids, None) for each in (together, one_by_one))
    if rows:
        size = float(expected.abs().max())
        torch.testing.assert_close(result, expected, atol=size * 4e-3, rtol=0)
        torch.testing.assert_close(fresh, zeros, atol=size * 4e-3, rtol=0)


@pytest.mark.parametrize("top_k", [1, 8, 11])
@pytest.mark.parametrize("width", [16, 1040])
def test_results_are_weighted_and_added(top_k: int, width: int) -> None:
    """Of more choices and columns than are added at a time, or fewer."""
    torch.manual_seed(0)
    expert_ids = torch.rand(5, 12).topk(top_k).indices.to(DEVICE)
    plan, shares = row_blocks(expert_ids, 12, [8]), torch.rand(5, top_k, device=DEVICE)
    results = torch.randn(5 * top_k, width, device=DEVICE)
    expected = (results[plan.places] * shares[..., None]).sum(1)
    summed = grouped_product.add_weighted(results, shares, plan, None)
    torch.testing.assert_close(summed, expected)
    added = grouped_product.add_weighted(results, shares, plan, torch.ones_like(summed))
    torch.testing.assert_close(added, expected + 1)


def test_experts_have_rows_of_a_codebook() -> None:
    weights = [run for (run,) in weights_of("IQ2_XS", 20, 256) if isinstance(run, QuantizedWeight)]
    x = torch.randn(4, 256, device=DEVICE).half()
    expert_ids = torch.rand(4, EXPERTS).topk(TOP_K).indices.to(DEVICE)
    plan = row_blocks(expert_ids, EXPERTS, [8])
    result = quantized_linear.multiply_grouped(x, stack_packed(map(pack, weights), EXPERTS), plan)
    values = torch.stack([dequantize(each) for each in weights])
    each = torch.einsum("ti,eoi->teo", x.float(), values)
    expected = each.gather(1, expert_ids[..., None].expand(-1, -1, 20))
    size = float(expected.abs().max())
    torch.testing.assert_close(result[plan.places].float(), expected, atol=size * 1e-3, rtol=0)


def test_experts_that_differ_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "works", lambda *_: True)
    mixed = [*weights_of(None, 2 * WIDTH, HIDDEN)[1:], *weights_of("Q8_0", 2 * WIDTH, HIDDEN)[:1]]
    down = weights_of(None, HIDDEN, WIDTH)
    experts = GpuOperators().prepare_experts(mixed, down, SILU, torch.float16)
    assert isinstance(experts, LoopedExperts)


def test_experts_that_are_wrong_are_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grouped_experts, "largest_error", lambda *_: 0.9)
    monkeypatch.setattr(grouped_experts, "first_difference", lambda *_: "")
    grouped_experts.works.cache_clear()
    assert not grouped_experts.works(None, torch.float16, torch.device("cuda"), 8)
    assert "one by one, because of Triton: their results are 0.9 off" in caplog.text
    monkeypatch.setattr(grouped_experts, "first_difference", lambda *_: "places of rows differ")
    assert not grouped_experts.works(None, torch.float16, torch.device("cuda"), 9)
    assert "one by one, because of Triton: places of rows differ" in caplog.text
    assert not grouped_experts.works(None, torch.float32, torch.device("cuda"), 8)
    assert not grouped_experts.works(None, torch.float16, torch.device("cpu"), 8)
    grouped_experts.works.cache_clear()
