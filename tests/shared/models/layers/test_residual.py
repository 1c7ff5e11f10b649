"""The residual stream adds its last summand when it is needed."""

from __future__ import annotations

import torch

from tandem.kernels.operators import Operators
from tandem.shared.models.layers.norm import RMSNorm
from tandem.shared.models.layers.residual import Residual
from tandem.shared.models.parallel import TensorParallel, WeightPlacement


class Counting(Operators):
    """Counts norms by whether they add."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls.append("norm")
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("add")
        return super().add_rms_norm(x, residual, weight, eps)


def test_a_norm_adds_what_is_pending() -> None:
    operators = Counting()
    place = WeightPlacement(torch.float32, torch.device("cpu"), TensorParallel(), operators)
    norm = RMSNorm(place, 8, 1e-6)
    norm.weight.fill_(2.0)
    x, first, second = torch.randn(3, 4, 8)
    stream = Residual(x)
    assert stream.normed(norm).equal(norm(x)) and stream.sum().equal(x)
    stream.add(first)
    stream.add(second)
    total = x + first + second
    operators.calls.clear()
    assert stream.normed(norm).equal(Operators().rms_norm(total, norm.weight, 1e-6))
    assert stream.normed(norm).equal(Operators().rms_norm(total, norm.weight, 1e-6))
    assert operators.calls == ["add", "norm"]
    assert stream.sum().equal(total)
    stream.add(first)
    assert stream.sum().equal(total + first)
    stream.add(first)
    stream.replace(x)
    assert stream.sum().equal(x)
