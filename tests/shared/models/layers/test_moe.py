"""The router at the ends of its range."""

from __future__ import annotations

import torch

from tandem.shared.models.layers.moe import ExpertRouter
from tandem.shared.models.parallel import TensorParallel, WeightPlacement
from tandem.shared.models.spec import RouterSpec


def test_a_row_that_no_expert_scores_gets_no_weight_rather_than_nan() -> None:
    spec = RouterSpec(
        experts=4,
        top_k=2,
        scoring="sigmoid",
        groups=1,
        open_groups=1,
        group_best=2,
        correction=False,
        normalise=True,
        scale=2.5,
    )
    router = ExpertRouter(
        WeightPlacement(torch.float32, torch.device("cpu"), TensorParallel()), spec, 8, 1e-6
    )
    router.weight.fill_(1.0)
    router.finish_loading()
    weights, expert_ids = router(torch.stack([torch.full((8,), -50.0), torch.ones(8)]))
    assert weights[0].tolist() == [0.0, 0.0] and expert_ids.shape == (2, 2)
    torch.testing.assert_close(weights[1], torch.full((2,), 1.25))
