"""A layer with experts in one call, beside the operators that it is made of."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.block_formats import Q4_0, Q8_0, BlockFormat
from tandem.kernels.cpu import jit
from tandem.kernels.quantized import QuantizedWeight
from tandem.kernels.signatures import FeedForward, Routing, Weight
from tandem.tests.support.random_blocks import random_weight

jit.prepare()

from tandem.kernels.cpu import expert_layer, grouped_experts  # noqa: E402
from tandem.kernels.cpu.byte_products import PanelLinear  # noqa: E402
from tandem.kernels.cpu.expert_layer import CompiledExpertLayer  # noqa: E402
from tandem.kernels.cpu.linear import PACKED  # noqa: E402
from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402

pytestmark = pytest.mark.skipif(not jit.multiplies_bytes(), reason="the CPU has no AVX2")
# As of test_layer_parts.py.
ATTENDED, HIDDEN = 64, 96
WIDTH, EXPERTS, TOP_K = 32, 21, 3
ROUTINGS = (
    Routing("softmax", TOP_K, None, True, 1.0),
    Routing("softmax", TOP_K, None, False, 2.5),
    Routing("sigmoid", TOP_K, torch.linspace(-0.2, 0.2, EXPERTS), True, 1.5),
)


def weight_of(format: BlockFormat, outputs: int, inputs: int, seed: int) -> QuantizedWeight:
    return random_weight(format, outputs, inputs // format.values, seed)


def both(routing: Routing) -> tuple[FeedForward, FeedForward]:
    """In one call, and composed with torch's routing."""
    operators = CompiledOperators()
    o = PanelLinear(weight_of(Q4_0, HIDDEN, ATTENDED, 1), None)
    norm = torch.linspace(0.5, 2, HIDDEN)
    generator = torch.Generator().manual_seed(2)
    router = operators.prepare_router(torch.randn(EXPERTS, HIDDEN, generator=generator), None)
    gate_up: list[Weight] = [
        tuple(weight_of(kind, WIDTH, HIDDEN, seed) for kind in (Q4_0, Q8_0))
        for seed in range(EXPERTS)
    ]
    down: list[Weight] = [(weight_of(Q8_0, HIDDEN, WIDTH, 99 + seed),) for seed in range(EXPERTS)]
    experts = operators.prepare_experts(gate_up, down, "silu", torch.float32)
    layer = operators.prepare_expert_feed_forward([o], norm, 1e-5, router, routing, experts)
    assert isinstance(layer, CompiledExpertLayer)

    def reference(attention_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        normed, out = operators.add_rms_norm(o(attention_out), x, norm, 1e-5)
        logits = router(normed)
        scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
        ranked = scores if routing.correction is None else scores + routing.correction
        expert_ids = ranked.topk(TOP_K).indices
        weights = scores.gather(1, expert_ids)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        experts(normed, weights * routing.scale, expert_ids, out)
        return out

    return layer, reference


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = (torch.randn(count, width, generator=generator) for width in (ATTENDED, HIDDEN))
    return next(tensors), next(tensors)


@pytest.mark.parametrize("routing", ROUTINGS, ids=["plain", "scaled", "corrected"])
@pytest.mark.parametrize("rows", [1, 4, 7, PACKED + 3])
def test_the_layer_is_its_operators(routing: Routing, rows: int) -> None:
    layer, reference = both(routing)
    result, expected = (each(*rows_of(rows)) for each in (layer, reference))
    # Weights differ in the last places, and with them what is rounded.
    assert (result - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("routing", ROUTINGS, ids=["plain", "scaled", "corrected"])
def test_a_row_is_the_same_in_any_batch(routing: Routing) -> None:
    layer, _ = both(routing)
    attention_out, x = rows_of(PACKED + 30)
    x[7, 2] = torch.nan
    whole = layer(attention_out, x)
    assert whole[7].isnan().all() and whole[8:].isfinite().all()
    for first, end in ((0, 1), (1, 6), (6, 30)):
        part = layer(attention_out[first:end], x[first:end])
        assert torch.equal(part.nan_to_num(7), whole[first:end].nan_to_num(7))


def test_no_step_waits_for_the_compiler() -> None:
    layers = [both(routing)[0] for routing in ROUTINGS]
    kernels = expert_layer.expert_layer, expert_layer.choose, grouped_experts.add_weighted
    before = [len(kernel.signatures) for kernel in kernels]
    for layer in layers:
        for rows in (1, 5, PACKED):
            layer(*rows_of(rows))
    assert [len(kernel.signatures) for kernel in kernels] == before
