"""The choice of experts and the router by Triton against torch's: on a GPU if there is one, else as
Triton interprets them. Without Triton they are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.kernels.reference import routing as reference
from tandem.kernels.signatures import Routing

pytest.importorskip("triton")

from tandem.kernels.gpu import router, routing_trial
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.routing import choose_experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOT_NUMBERS = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
GROUPED: dict[str, Any] = {"groups": 4, "open_groups": 2}


def vector(experts: int) -> torch.Tensor:
    return torch.rand(experts, device=DEVICE)


@pytest.mark.parametrize(
    ("experts", "routing"),
    [
        (1, Routing("softmax", 1, None, True, 1.0)),
        (128, Routing("softmax", 8, None, True, 1.0)),
        (60, Routing("softmax", 3, None, False, 2.5)),
        (512, Routing("sigmoid", 10, vector(512), True, 1.5)),
        (20, Routing("sigmoid", 5, None, True, 1.0, expert_scale=vector(20))),
        (256, Routing("sigmoid", 8, vector(256), True, 2.5, 8, 4, 2)),
        (20, Routing("softmax", 4, None, False, 1.0, **GROUPED)),
        (12, Routing("sigmoid", 6, vector(12), True, 1.0, **GROUPED, group_best=3)),
        (12, Routing("softmax", 2, None, True, 1.0, groups=3, open_groups=3)),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_experts_are_those_that_torch_chooses(experts: int, routing: Routing, rows: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, experts, device=DEVICE)
    weights, expert_ids = choose_experts(logits, routing)
    assert weights.dtype == torch.float32 and expert_ids.dtype == torch.int64
    assert weights.shape == expert_ids.shape == (rows, routing.top_k)
    sides = [(weights, expert_ids), reference.choose_experts(logits, routing)]
    ours, theirs = (torch.zeros_like(logits).scatter_(1, ids, w) for w, ids in sides)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    (sorted_ids, expected_ids) = (ids.sort(dim=1).values for _, ids in sides)
    assert torch.equal(sorted_ids, expected_ids)


def test_of_equal_scores_the_first_are_chosen() -> None:
    logits = torch.zeros(2, 12, device=DEVICE)
    for more, expected in (({}, [0, 1, 2]), (GROUPED | {"open_groups": 1}, [0, 1, 2])):
        _, ids = choose_experts(logits, Routing("softmax", 3, None, True, 1.0, **more))
        assert ids.tolist() == [expected] * 2


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_scores_may_be_too_small_to_be_numbers() -> None:
    logits = torch.full((1, 8), -1e4, device=DEVICE)
    weights, _ = choose_experts(logits, Routing("sigmoid", 2, None, True, 1.0))
    assert weights.tolist() == [[0.0, 0.0]]


@NOT_NUMBERS
def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    logits[1] = torch.arange(12)
    for scoring in ("softmax", "sigmoid"):
        for more in ({}, GROUPED):
            routing = Routing(scoring, 3, None, True, 1.0, **more)
            weights, ids = choose_experts(logits, routing)
            assert ids.min() >= 0 and ids.max() < 12
            assert weights[0].isnan().all() and weights[1].isfinite().all()


@pytest.mark.parametrize("few", [router.FEW, 5])
@pytest.mark.parametrize(("inputs", "experts"), [(16, 5), (272, 70), (2320, 20)])
def test_logits_are_those_of_fp32(
    monkeypatch: pytest.MonkeyPatch, few: int, inputs: int, experts: int
) -> None:
    """In steps of few rows and many; of numbers that fp16 represents, as the interpreter does not
    multiply bf16."""
    monkeypatch.setattr(router, "FEW", few)
    torch.manual_seed(0)
    x, weight = (torch.randn(n, inputs, device=DEVICE).half() for n in (19, experts))
    for rows in (0, 1, 19):
        parts = router.multiply_router(x[:rows], weight)
        assert len(parts) == (1 if rows > few else min(-(-inputs // 256), 5))
        expected = x[:rows].float() @ weight.float().t()
        torch.testing.assert_close(parts.sum(0), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_router_chooses_as_torch_does(scoring: Any) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 528, device=DEVICE).half() for n in (7, 20))
    routing = Routing(scoring, 4, vector(20), True, 1.5, **GROUPED)
    bias = vector(20)
    weights, ids = router.route(x, weight, bias, routing)
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias)
    expected, expected_ids = reference.choose_experts(logits, routing)
    ours, theirs = (
        torch.zeros_like(logits).scatter_(1, *side)
        for side in ((ids, weights), (expected_ids, expected))
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_weights_are_narrowed_only_if_they_stay_the_same() -> None:
    weight = torch.randn(4, 32).bfloat16().float()
    narrow = routing_trial.narrowed(weight, torch.bfloat16)
    assert narrow is not None and narrow.dtype == torch.bfloat16
    weight[3, 31] = 1 / 3
    assert routing_trial.narrowed(weight, torch.bfloat16) is None
    assert routing_trial.narrowed(weight.half().float(), torch.float16) is not None
    assert routing_trial.narrowed(weight, torch.float32) is None
    assert routing_trial.narrowed(weight[:, :31], torch.bfloat16) is None


def test_what_a_rank_tries_at_its_start_finds_them_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "FEW", routing_trial._ROWS)  # many rows take seconds here
    plain = Routing("softmax", 4, None, True, 2.0)
    grouped = Routing("sigmoid", 4, None, True, 2.0, **GROUPED)
    for routing, has in ((plain, (False, True)), (grouped, (True, False))):
        assert routing_trial.largest_error(routing, has, 16, DEVICE) < 1e-5
        kind = routing, (*has, True), (16, 64), torch.float16
        assert routing_trial.router_error(*kind, DEVICE) < 1e-5


def test_a_choice_that_is_wrong_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing_trial, "largest_error", lambda *_: 0.5)
    monkeypatch.setattr(routing_trial, "router_error", lambda *_: 0.5)
    for trial in (routing_trial._works, routing_trial._router_works):
        trial.cache_clear()
    routing = Routing("softmax", 2, None, True, 1.0)
    weight = torch.empty(8, 16, device="meta")
    assert GpuOperators().prepare_fused_router(weight, None, routing, torch.float16) is None
    assert "torch multiplies for the choice of experts, because of Triton" in caplog.text
    choose = GpuOperators().prepare_routing(routing, 8, torch.device("cuda"))
    assert choose.func is reference.choose_experts  # type: ignore[attr-defined]
    assert "torch chooses experts, because of Triton: its results are 0.5 off" in caplog.text
    for trial in (routing_trial._works, routing_trial._router_works):
        trial.cache_clear()
