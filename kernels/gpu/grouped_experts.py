"""Experts of a mixture on a GPU: one launch plans their rows, and one computes each half of all
experts. Nothing waits for the host.

T rows, K experts of each, S = T K rows of all experts, in order of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ..activations import Activation
from ..block_formats import BlockFormat
from ..quantized import QuantizedWeight
from ..signatures import Weight
from . import quantized_trial
from .grouped_product import ROWS, add_weighted, multiply_experts
from .packed_codes import PackedCodes, pack, stack_packed
from .quantized_linear import multiply_grouped
from .row_blocks import RowBlocks, row_blocks
from .row_plan import plan_rows
from .trials import passes, too_far

ActAndMul = Callable[[torch.Tensor, Activation], torch.Tensor]
# Inputs of plain weights are a multiple of this (``grouped_product.py``).
_ALIGNED = 16
# Rows of the plans in the trial: for one program, and for the maximum number with several steps.
_TRIAL_ROWS = 3, 3000


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """The weights of all experts, in runs of outputs: numbers [E, O, I], or packed codes."""

    experts: int
    runs: tuple[torch.Tensor | PackedCodes, ...]
    bias_EO: torch.Tensor | None

    def multiply(self, x: torch.Tensor, plan: RowBlocks) -> torch.Tensor:
        """The products [S, outputs] of the plan's rows."""
        products = [_product(x, run, plan) for run in self.runs]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if self.bias_EO is None else out + self.bias_EO[plan.owners].to(out.dtype)


class TritonExperts:
    """See ``signatures.Experts``. A row's results are added in the order of its choices."""

    waits = False

    def __init__(
        self,
        gate_up: StackedWeights,
        down: StackedWeights,
        act_and_mul: ActAndMul,
        activation: Activation,
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._act_and_mul = act_and_mul
        self._activation = activation

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``signatures.Experts``."""
        if not len(x):
            return torch.empty_like(x) if out is None else out
        plan = plan_rows(expert_ids, self._gate_up.experts, ROWS)
        hidden = self._act_and_mul(self._gate_up.multiply(x, plan), self._activation)
        results = self._down.multiply(hidden, plan.of_products())
        return add_weighted(results, weights, plan, out)


def _product(x: torch.Tensor, weights: torch.Tensor | PackedCodes, plan: RowBlocks) -> torch.Tensor:
    if isinstance(weights, torch.Tensor):
        return multiply_experts(x, weights, plan)
    return multiply_grouped(x, weights, plan)


def stackable(weights: list[Weight], dtype: torch.dtype) -> bool:
    """True if all experts have the same kinds of weights, and kernels multiply them with
    activations of ``dtype``."""
    kinds = {tuple(_kind(run) for run in weight) for weight in weights}
    return len(kinds) == 1 and all(_takes(run, dtype, len(weights)) for run in weights[0])


def _kind(run: torch.Tensor | QuantizedWeight) -> tuple[object, ...]:
    if isinstance(run, torch.Tensor):
        return run.dtype, run.shape
    return run.format, run.blocks.shape, run.order is None


def _takes(run: torch.Tensor | QuantizedWeight, dtype: torch.dtype, experts: int) -> bool:
    if isinstance(run, QuantizedWeight):
        return run.order is None and works(run.format, dtype, run.blocks.device, experts)
    aligned = run.shape[1] % _ALIGNED == 0
    return aligned and run.dtype == dtype and works(None, dtype, run.device, experts)


def stack(weights: list[Weight], biases: list[torch.Tensor] | None) -> StackedWeights:
    """Stack ``stackable`` weights. Empties the list, so that only one run is in memory twice."""
    experts, runs = len(weights), [list(each) for each in zip(*weights, strict=True)]
    weights.clear()
    stacks = tuple(_stacked(run) for run in runs)
    return StackedWeights(experts, stacks, torch.stack(biases) if biases else None)


def _stacked(runs: list[torch.Tensor | QuantizedWeight]) -> torch.Tensor | PackedCodes:
    count, first = len(runs), runs[0]
    runs.reverse()
    rest = (runs.pop() for _ in range(count))
    if not isinstance(first, torch.Tensor):
        return stack_packed(
            (pack(each) for each in rest if isinstance(each, QuantizedWeight)), count
        )
    stacked = first.new_empty(count, *first.shape)
    for into, each in zip(stacked, rest, strict=True):
        assert isinstance(each, torch.Tensor)
        into.copy_(each)
    return stacked


@cache
def works(kind: BlockFormat | None, dtype: torch.dtype, device: torch.device, experts: int) -> bool:
    """True if the kernels for this number of experts, with weights of a format or plain ones,
    compile and are correct on this device; logs the reason if not. Tries each size of blocks."""
    if device.type == "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if kind is not None and not quantized_trial.works(kind, dtype, device):
        return False

    def trial() -> str:
        if difference := first_difference(experts, device):
            return difference
        worst = max(largest_error(kind, dtype, device, size) for size in ROWS)
        return too_far(worst, quantized_trial.limit(dtype), "their")

    return passes(trial, "experts are computed one by one, because of Triton")


def first_difference(experts: int, device: torch.device) -> str:
    """The difference between Triton's plans of rows and torch's, if any. Some experts have many
    more rows than others."""
    generator = torch.Generator().manual_seed(0)
    for rows in _TRIAL_ROWS:
        scores = torch.rand(rows, experts, generator=generator)
        scores *= torch.linspace(0.7, 1, experts)
        expert_ids = scores.topk(min(experts, 8), sorted=False).indices.to(device)
        plan = plan_rows(expert_ids, experts, ROWS)
        if device.type == "meta":  # nothing is computed there
            continue
        expected = row_blocks(expert_ids, experts, ROWS)
        for name in ("blocks", "sources", "numbers", "owners", "places"):
            if not torch.equal(getattr(plan, name), getattr(expected, name)):
                return f"{name} of their rows differ"
    return ""


def largest_error(
    kind: BlockFormat | None, dtype: torch.dtype, device: torch.device, rows: int
) -> float:
    """The largest difference from the reference, for results of magnitude 1: ``rows`` rows, of
    which each of three experts computes two thirds."""
    generator = torch.Generator().manual_seed(0)
    if kind is None:
        dense = torch.randn(3, 99, 19 * _ALIGNED, generator=generator).to(device, dtype)
        weights: torch.Tensor | PackedCodes = dense
    else:
        packed, values = zip(
            *(quantized_trial.random_codes(kind, device, generator) for _ in range(3)), strict=True
        )
        weights, dense = stack_packed(packed, 3), torch.stack(values)
    x = torch.randn(rows, dense.shape[2], generator=generator).to(device, dtype)
    expert_ids = torch.rand(rows, 3, generator=generator).topk(2).indices.to(device)
    shares = torch.rand(rows, 2, generator=generator).to(device)
    plan = plan_rows(expert_ids, 3, ROWS)
    # The outputs, and more that are 0, so that there are as many as a sum has.
    results = torch.nn.functional.pad(_product(x, weights, plan), (0, -99 % _ALIGNED))
    summed = add_weighted(results, shares, plan, None)
    twice = add_weighted(results, shares, plan, summed.clone())
    if device.type == "meta":  # nothing is computed there
        return 0.0
    each = torch.einsum("ti,eoi->teo", x.float(), dense.float())
    expected = (
        each.gather(1, expert_ids[..., None].expand(-1, -1, 99)).mul(shares[..., None]).sum(1)
    )
    size = dense.float().norm(dim=2).max()
    errors = [summed[:, :99].float() - expected, twice[:, :99].float() / 2 - expected]
    return float((torch.stack(errors) / size).abs().nan_to_num(torch.inf).max())
