"""Mixture of experts: a few of many feed-forwards compute each token, and a shared one if there is
one.

T rows, E experts, K of them for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ....kernels.operators import Operators
from ....kernels.signatures import ExpertChoice, Experts, FeedForward, Linear, Routing
from ..parallel import WeightPlacement, WeightSlot, replicated_slot
from ..spec import DenseSpec, MoESpec, RouterSpec
from .ffn import DenseMLP
from .linear_method import LinearMethod, LinearPart, choose_method
from .norm import RMSNorm
from .part import Part


class MoE(Part):
    """Every rank routes all rows, with equal results, and has a part of each expert's width."""

    def __init__(self, place: WeightPlacement, spec: MoESpec, hidden: int, eps: float) -> None:
        self.tp = place.tp
        self.router = ExpertRouter(place.at("router"), spec.router, hidden, eps)
        self.shared = (
            None if spec.shared is None else DenseMLP(place.at("shared"), spec.shared, hidden)
        )
        self.shared_gate = SharedGate(place.at("shared_gate"), hidden) if spec.shared_gate else None
        self.experts = ExpertWeights(place, spec.expert, spec.router.experts, hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = None
        if self.shared is not None:
            out = self.shared.partial(x)
            if self.shared_gate is not None:
                out = out * self.shared_gate(x)
        weights, expert_ids = self.router(x)
        return self.tp.all_reduce(self.experts(x, weights, expert_ids, out))

    def prepare(self, o: Sequence[Linear], norm: RMSNorm) -> FeedForward | None:
        """A fused operator for the layer from its output projection on, if this is its whole
        feed-forward and the operators have one."""
        routing = self.router.routing()
        if self.shared is not None or routing is None:
            return None
        return self.router.operators.prepare_expert_feed_forward(
            o, norm.weight, norm.eps, self.router.linear, routing, self.experts.operator
        )


class NormedMoE(Part):
    """A dense feed-forward and experts in parallel, each followed by a norm. The router and the
    experts, which have their own norm, see the layer's residual."""

    def __init__(self, place: WeightPlacement, spec: MoESpec, hidden: int, eps: float) -> None:
        assert spec.shared is not None
        self.tp = place.tp
        self.router = ExpertRouter(place.at("router"), spec.router, hidden, eps)
        # Named like the feed-forward of a layer without experts.
        self.shared = DenseMLP(place, spec.shared, hidden)
        self.experts = ExpertWeights(place, spec.expert, spec.router.experts, hidden)
        self.experts_norm = RMSNorm(place.at("experts_norm"), hidden, eps)
        self.post_experts_norm = RMSNorm(place.at("post_experts_norm"), hidden, eps)
        self.post_shared_norm = RMSNorm(place.at("post_shared_norm"), hidden, eps)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        weights, expert_ids = self.router(residual)
        out = self.experts(self.experts_norm(residual), weights, expert_ids, None)
        expert_out = self.post_experts_norm(self.tp.all_reduce(out))
        return self.post_shared_norm(self.shared(x)) + expert_out


class SharedGate(Part):
    """The factor of the shared feed-forward's result: the sigmoid of a projection."""

    def __init__(self, place: WeightPlacement, hidden: int) -> None:
        self.weight = place.empty(1, hidden)
        self.name = place.name("weight")
        self.operators = place.operators
        self._linear: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._linear is not None, "finish_loading() comes first"
        return self._linear(x).sigmoid()

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: replicated_slot(self.weight)}

    def pack(self) -> None:
        self._linear = self.operators.prepare_linear(self.weight, None)
        del self.weight


class ExpertWeights(Part):
    """The weights of all experts, and the operator that they are packed for."""

    def __init__(self, place: WeightPlacement, spec: DenseSpec, experts: int, hidden: int) -> None:
        mine = place.tp.shard(spec.intermediate)
        shard, whole = (spec.intermediate, mine), (hidden, range(hidden))
        places = [place.at(f"experts.{index}") for index in range(experts)]
        self.operators: Operators = place.operators
        self.device = place.device
        self.width = len(mine)
        self.activation = spec.activation
        self.activations = place.activations
        self.gate_up: list[LinearMethod] = [
            choose_method(
                each, [LinearPart(each.name(f"{n}.weight"), shard, whole) for n in ("gate", "up")]
            )
            for each in places
        ]
        self.down: list[LinearMethod] = [
            choose_method(each, [LinearPart(each.name("down.weight"), whole, shard)])
            for each in places
        ]
        self.biases = [_ExpertBias(each, shard, hidden) for each in places] if spec.bias else []
        # Added on one rank only, since results are summed over all.
        self.adds_down_bias = place.tp.rank == 0
        self._experts: Experts | None = None

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``signatures.Experts``."""
        return self.operator(x, weights, expert_ids, out)

    @property
    def operator(self) -> Experts:
        """The operator that computes the experts."""
        assert self._experts is not None, "finish_loading() comes first"
        return self._experts

    def own_slots(self) -> dict[str, WeightSlot]:
        methods = (*self.gate_up, *self.down)
        return {name: slot for each in methods for name, slot in each.weight_slots().items()}

    def pack(self) -> None:
        self.operators.prepare_act_and_mul(
            self.activation, self.width, self.activations, self.device
        )
        self._experts = self.operators.prepare_experts(
            [each.take_weight() for each in self.gate_up],
            [each.take_weight() for each in self.down],
            self.activation,
            self.activations,
            [bias.gate_up for bias in self.biases] or None,
            [bias.down for bias in self.biases] if self.biases and self.adds_down_bias else None,
        )


class _ExpertBias(Part):
    """The biases of one expert; gate and up are split over ranks."""

    def __init__(self, place: WeightPlacement, shard: tuple[int, range], hidden: int) -> None:
        total, mine = shard
        self.gate_up = place.empty(2 * len(mine))
        self.down = place.empty(hidden)
        self.slots = {
            place.name(f"{name}.bias"): WeightSlot(half, (total,), 0, mine.start, mine.stop)
            for name, half in zip(("gate", "up"), self.gate_up.chunk(2), strict=True)
        } | {place.name("down.bias"): replicated_slot(self.down)}

    def own_slots(self) -> dict[str, WeightSlot]:
        return self.slots


class ExpertRouter(Part):
    """Chooses experts, in float32 for any dtype of weights: rounding could change the choice."""

    def __init__(self, place: WeightPlacement, spec: RouterSpec, hidden: int, eps: float) -> None:
        self.spec = spec
        self.operators = place.operators
        precise = replace(place, dtype=torch.float32)
        self.weight = precise.empty(spec.experts, hidden)
        self.slots = {place.name("weight"): replicated_slot(self.weight)}

        def vector(name: str, size: int, has: bool) -> torch.Tensor | None:
            if not has:
                return None
            weight = precise.empty(size)
            self.slots[place.name(name)] = replicated_slot(weight)
            return weight

        self.logit_bias = vector("logits.bias", spec.experts, spec.bias)
        self.correction = vector("bias", spec.experts, spec.correction)
        self.expert_scale = vector("expert_scale.weight", spec.experts, spec.expert_scale)
        self.input_norm = vector("norm.weight", hidden, spec.input_norm)
        self.eps = eps
        self.activations = place.activations
        self._fused: ExpertChoice | None = None
        self._linear: Linear | None = None
        self._choose: ExpertChoice | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices of the experts of each row, both [T, K]."""
        if self._fused is not None:
            return self._fused(x)
        wide = x.float()
        if self.input_norm is not None:
            wide = self.operators.rms_norm(wide, self.input_norm, self.eps) * wide.shape[1] ** -0.5
        assert self._choose is not None, "finish_loading() comes first"
        return self._choose(self.linear(wide))

    @property
    def linear(self) -> Linear:
        """The linear that computes the logits."""
        assert self._linear is not None, "finish_loading() comes first"
        return self._linear

    def routing(self) -> Routing | None:
        """The rule by which logits choose experts, for other fused operators; ``None`` if they lack
        it, or the router is fused."""
        spec = self.spec
        if self._fused is not None:
            return None
        if spec.open_groups < spec.groups or self.expert_scale is not None or spec.input_norm:
            return None
        return self._routing()

    def _routing(self) -> Routing:
        spec = self.spec
        return Routing(
            scoring=spec.scoring,
            top_k=spec.top_k,
            correction=self.correction,
            normalise=spec.normalise,
            scale=spec.scale,
            groups=spec.groups,
            open_groups=spec.open_groups,
            group_best=spec.group_best,
            expert_scale=self.expert_scale,
        )

    def own_slots(self) -> dict[str, WeightSlot]:
        return self.slots

    def pack(self) -> None:
        routing, weight = self._routing(), self.weight
        if self.input_norm is None:
            self._fused = self.operators.prepare_fused_router(
                weight, self.logit_bias, routing, self.activations
            )
        if self._fused is None:
            self._linear = self.operators.prepare_router(weight, self.logit_bias)
            self._choose = self.operators.prepare_routing(routing, self.spec.experts, weight.device)
        del self.weight, self.slots
