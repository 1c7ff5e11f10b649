"""GPT-2: learned positions, LayerNorms, and matrices that are stored as [inputs, outputs]."""

from __future__ import annotations

from ..config import Config
from ..spec import DecoderSpec, NormKind, PositionTable
from ..weight_names import Split, Transposed, WeightNames, per_layer
from .dense import read_dense, read_plain_attention, read_plain_mlp

_LAYER = "transformer.h.{i}"
_BOTH = ("weight", "bias")
_QKV = tuple(f"layers.{{i}}.attention.{part}" for part in "qkv")
_MATRICES = {"attn.c_proj": "attention.o", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
# The first models were published without the prefix of names: see ``with_short_names``.
WEIGHTS: WeightNames = {
    "transformer.wte.weight": "embed.weight",
    "transformer.wpe.weight": "positions.weight",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
    **per_layer({"ln_1": "attention_norm", "ln_2": "mlp_norm"}, root=f"{_LAYER}.", kinds=_BOTH),
    f"{_LAYER}.attn.c_attn.weight": Transposed(Split(tuple(f"{part}.weight" for part in _QKV))),
    f"{_LAYER}.attn.c_attn.bias": Split(tuple(f"{part}.bias" for part in _QKV)),
    **{
        f"{_LAYER}.{theirs}.weight": Transposed(f"layers.{{i}}.{ours}.weight")
        for theirs, ours in _MATRICES.items()
    },
    **per_layer(_MATRICES, root=f"{_LAYER}.", kinds=("bias",)),
    # Masks, which are computed from the config.
    f"{_LAYER}.attn.bias": None,
    f"{_LAYER}.attn.masked_bias": None,
}


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("scale_attn_weights", (True,), True)
    config.one_of("scale_attn_by_inverse_layer_idx", (False,), False)
    for key in list(config.values):
        if key.startswith("summary_"):
            config.get(key)  # for a classifier head
    config.get("reorder_and_upcast_attn")  # for training in float16
    # Tokens for tasks, in addition to the vocabulary.
    config.one_of("n_special", (0,), 0)
    config.get("predict_special_tokens")
    layers = config.integer("num_hidden_layers")
    attention = read_plain_attention(config)
    width = 4 * config.integer("hidden_size")
    mlp = read_plain_mlp(config, "gelu_new", key="activation_function", width=width)
    return read_dense(
        config,
        attention,
        windows=[None] * layers,
        ropes=[None] * layers,
        mlps=[mlp] * layers,
        norm=NormKind.LAYER,
        eps_key="layer_norm_epsilon",
        norm_eps=1e-5,
        tie_embeddings=True,
        positions=PositionTable(rows=config.integer("max_position_embeddings")),
    )
