"""DeepSeek V2 and V3: latent attention, and experts after the first layers."""

from __future__ import annotations

from typing import Literal

from ..config import Config, read_rope
from ..spec import (
    Activation,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    RopeSpec,
    RouterSpec,
    YarnScaling,
)
from ..weight_names import Deinterleave, WeightNames, stacked_experts
from .dense import DENSE_WEIGHTS, read_decoder

_ATTENTION: WeightNames = {
    f"model.layers.{{i}}.self_attn.{theirs}.weight": f"layers.{{i}}.attention.{ours}.weight"
    for theirs, ours in {
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "kv_b",
    }.items()
}
# Dimensions that rotate together may be neighbours, by the spec.
_ROTATED: WeightNames = {
    f"model.layers.{{i}}.self_attn.{theirs}.weight": Deinterleave(
        f"layers.{{i}}.attention.{ours}.weight"
    )
    for theirs, ours in {"q_proj": "q", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a"}.items()
}
_EXPERTS: WeightNames = {
    f"model.layers.{{i}}.mlp.{theirs}.{part}_proj.weight": f"layers.{{i}}.mlp.{ours}.{part}.weight"
    for theirs, ours in {"experts.{j}": "experts.{j}", "shared_experts": "shared"}.items()
    for part in ("gate", "up", "down")
}
_ROUTER: WeightNames = {
    "model.layers.{i}.mlp.gate.weight": "layers.{i}.mlp.router.weight",
    "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.router.bias",
}
EXPERTS: WeightNames = _EXPERTS | _ROUTER | stacked_experts("mlp.experts")
WEIGHTS = DENSE_WEIGHTS | _ATTENTION | _ROTATED | EXPERTS

# About training, expert parallelism, layers that predict further tokens; or implied by other keys.
_NO_EFFECT = (
    "aux_loss_alpha",
    "ep_size",
    "n_group",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "qk_head_dim",
    "seq_aux",
    "topk_group",
)
# For the norms inside attention; the config's value is for the others.
_LATENT_EPS = 1e-6


def read_v2(config: Config) -> DecoderSpec:
    """Read V2: scores are a softmax, and groups matter with ``group_limited_greedy`` only."""
    methods = ("greedy", "group_limited_greedy")
    has_groups = config.one_of("topk_method", methods, methods[0]) == methods[1]
    config.one_of("scoring_func", ("softmax",), "softmax")
    config.one_of("norm_topk_prob", (False,), False)
    router = _read_router(config, "softmax", grouped=has_groups)
    return _read(config, router, rope_interleaved=True)


def read_v3(config: Config) -> DecoderSpec:
    """Read V3: scores are sigmoids, and the choice has a bias that balances the experts."""
    router = _read_sigmoid_router(config)
    return _read(config, router, rope_interleaved=config.flag("rope_interleave", default=True))


def read_glm4_lite(config: Config) -> DecoderSpec:
    """Read GLM-4.7-Flash: V3 whose dense layers may be listed by kind."""
    kinds, dense = config.get("mlp_layer_types"), config.count("first_k_dense_replace", 1)
    if kinds is not None:
        layers = config.integer("num_hidden_layers")
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise config.refusal("mlp_layer_types", kinds, "dense layers before sparse ones")
        config.one_of("first_k_dense_replace", (dense,), dense)
    router = _read_sigmoid_router(config)
    interleaved = config.flag("rope_interleave", default=True)
    return _read(config, router, rope_interleaved=interleaved, first=dense, norm_eps=1e-5)


def read_sigmoid_experts(config: Config) -> MoESpec:
    """V3's experts, for a family with another attention."""
    return _read_experts(config, _read_sigmoid_router(config), "silu")


def _read_sigmoid_router(config: Config) -> RouterSpec:
    config.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    config.one_of("scoring_func", ("sigmoid",), "sigmoid")
    return _read_router(
        config,
        "sigmoid",
        group_best=2,
        correction=True,
        normalise=config.flag("norm_topk_prob", default=True),
    )


def _read(
    config: Config,
    router: RouterSpec,
    *,
    rope_interleaved: bool,
    first: int | None = None,
    norm_eps: float = 1e-6,
) -> DecoderSpec:
    """``first`` is the number of dense layers; by default it is read like V3's."""
    for key in ("attention_bias", "mlp_bias"):
        config.one_of(key, (False,), False)
    for key in _NO_EFFECT:
        config.get(key)
    for key in ("rope_interleaved", "rotary_interleaved"):
        config.one_of(key, (rope_interleaved,), rope_interleaved)
    rope = _read_rope(config)
    attention = _read_attention(config, rope, rope_interleaved)
    dense = DenseSpec(
        intermediate=config.integer("intermediate_size"),
        activation=config.one_of("hidden_act", ("silu",), "silu"),
    )
    experts = _read_experts(config, router, dense.activation)
    if first is None:
        first = config.count("first_k_dense_replace")
    config.one_of("moe_layer_freq", (1,), 1)
    layers = tuple(
        LayerSpec(attention=attention, mlp=dense if index < first else experts, rope=rope)
        for index in range(config.integer("num_hidden_layers"))
    )
    return read_decoder(config, layers, norm_eps=norm_eps)


def _read_rope(config: Config) -> RopeSpec:
    dim = config.integer("qk_rope_head_dim")
    if dim % 2:
        raise config.refusal("qk_rope_head_dim", dim, "an even number")
    config.one_of("head_dim", (dim,), dim)
    return read_rope(config, dim)


def _read_attention(config: Config, rope: RopeSpec, rope_interleaved: bool) -> MLASpec:
    heads = config.integer("num_attention_heads")
    config.one_of("num_key_value_heads", (heads,), heads)
    nope_dim = config.integer("qk_nope_head_dim")
    scaling = rope.scaling
    stretch = scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0
    return MLASpec(
        num_heads=heads,
        q_lora_rank=config.integer("q_lora_rank") if config.get("q_lora_rank") else None,
        kv_lora_rank=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope.dim,
        v_dim=config.integer("v_head_dim"),
        softmax_scale=stretch * (nope_dim + rope.dim) ** -0.5,
        norm_eps=_LATENT_EPS,
        rope_interleaved=rope_interleaved,
    )


def _read_experts(config: Config, router: RouterSpec, activation: Activation) -> MoESpec:
    width = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts")
    return MoESpec(
        router=router,
        expert=DenseSpec(intermediate=width, activation=activation),
        shared=DenseSpec(intermediate=shared * width, activation=activation),
    )


def _read_router(
    config: Config,
    scoring: Literal["softmax", "sigmoid"],
    *,
    grouped: bool = True,
    group_best: int = 1,
    correction: bool = False,
    normalise: bool = False,
) -> RouterSpec:
    experts = config.integer("n_routed_experts")
    groups, open_groups = _read_groups(config, experts, group_best) if grouped else (1, 1)
    top_k = config.integer("num_experts_per_tok")
    max_top_k = experts // groups * open_groups
    if top_k > max_top_k:
        raise config.refusal("num_experts_per_tok", top_k, f"up to {max_top_k}")
    return RouterSpec(
        experts=experts,
        top_k=top_k,
        scoring=scoring,
        groups=groups,
        open_groups=open_groups,
        group_best=group_best,
        correction=correction,
        normalise=normalise,
        scale=config.number("routed_scaling_factor"),
    )


def _read_groups(config: Config, experts: int, min_experts: int) -> tuple[int, int]:
    """The numbers of groups and of open groups. Each group has at least ``min_experts`` experts."""
    groups, open_groups = config.integer("n_group"), config.integer("topk_group")
    if experts % groups or experts // groups < min_experts:
        raise config.refusal(
            "n_group", groups, f"a divisor of {experts} up to {experts // min_experts}"
        )
    if open_groups > groups:
        raise config.refusal("topk_group", open_groups, f"up to {groups}")
    return groups, open_groups
