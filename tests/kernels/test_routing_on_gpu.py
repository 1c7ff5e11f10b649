"""The choice of experts by Triton against torch's: on a GPU if there is one, else as Triton
interprets it. Without Triton it is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.kernels.gpu import routing_trial
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.reference import routing as reference
from tandem.kernels.signatures import Routing

pytest.importorskip("triton")

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


def test_what_a_rank_tries_at_its_start_finds_them_right() -> None:
    plain = Routing("softmax", 4, None, True, 2.0)
    grouped = Routing("sigmoid", 4, None, True, 2.0, **GROUPED)
    for routing, has in ((plain, (False, True)), (grouped, (True, False))):
        assert routing_trial.largest_error(routing, has, 16, DEVICE) < 1e-5


def test_a_choice_that_is_wrong_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing_trial, "largest_error", lambda *_: 0.5)
    routing_trial._works.cache_clear()
    routing = Routing("softmax", 2, None, True, 1.0)
    choose = GpuOperators().prepare_routing(routing, 8, torch.device("cuda"))
    assert choose.func is reference.choose_experts  # type: ignore[attr-defined]
    assert "torch chooses experts, because of Triton: its results are 0.5 off" in caplog.text
    routing_trial._works.cache_clear()
