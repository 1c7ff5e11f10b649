"""Qwen3's mixtures of experts: a norm over each head of q and k, and no shared expert."""

from __future__ import annotations

from ..config import FULL, Config, read_layer_types, read_window
from ..spec import DecoderSpec, DenseSpec, MoESpec, RouterSpec
from ..weight_names import WeightNames, in_layers, stacked_experts
from . import qwen3
from .dense import read_dense, read_mlp

_EXPERT = {f"{part}_proj": f"mlp.experts.{{j}}.{part}" for part in ("gate", "up", "down")}
EXPERTS: WeightNames = (
    in_layers("mlp.experts.{j}", _EXPERT)
    | in_layers("mlp", {"gate": "mlp.router"})
    | stacked_experts("mlp.experts")
)
WEIGHTS: WeightNames = qwen3.WEIGHTS | EXPERTS


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("shared_expert_intermediate_size", (0,), 0)
    windows = _read_windows(config)
    attention = qwen3.read_normed_attention(config)
    mlps = read_mlps(config, len(windows), read_experts(config))
    return read_dense(config, attention, windows=windows, mlps=mlps)


def read_mlps(config: Config, layers: int, experts: MoESpec) -> list[DenseSpec | MoESpec]:
    """The feed-forward of each layer: dense ones in ``mlp_only_layers``, and in those that
    ``decoder_sparse_step`` skips."""
    dense = read_mlp(config)
    step, dense_layers = config.integer("decoder_sparse_step", 1), config.layers("mlp_only_layers")
    return [
        dense if index in dense_layers or (index + 1) % step else experts for index in range(layers)
    ]


def _read_windows(config: Config) -> list[int | None]:
    """``sliding_window`` in all layers, only with ``use_sliding_window``."""
    layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window"):
        config.get("sliding_window")
        config.get("layer_types")
        return [None] * layers
    window, kinds = read_window(config), read_layer_types(config, layers)
    if kinds is not None and FULL in kinds:
        raise config.refusal("layer_types", kinds, "sliding_attention only, for this family")
    return [window] * layers


def read_experts(config: Config) -> MoESpec:
    """The experts, chosen by a softmax."""
    # Renamed in transformers 5.
    experts = config.integer("num_local_experts", config.get("num_experts"))
    top_k = config.integer("num_experts_per_tok", at_most=experts)
    router = RouterSpec(
        experts=experts,
        top_k=top_k,
        scoring="softmax",
        groups=1,
        open_groups=1,
        group_best=1,
        correction=False,
        normalise=config.flag("norm_topk_prob"),
        scale=1.0,
    )
    return MoESpec(
        router=router, expert=DenseSpec(intermediate=config.integer("moe_intermediate_size"))
    )
