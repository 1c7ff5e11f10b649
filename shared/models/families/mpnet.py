"""MPNet: an encoder like RoBERTa, with a bias of scores by distance and without segments; also with
a head that scores or labels texts."""

from __future__ import annotations

from ..config import Config
from ..spec import DecoderSpec, PositionBias
from ..weight_names import WeightNames, per_layer
from . import bert

_BOTH = ("weight", "bias")
_ENCODER: WeightNames = {
    "embeddings.word_embeddings.weight": "embed.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.LayerNorm.weight": "embedding_norm.weight",
    "embeddings.LayerNorm.bias": "embedding_norm.bias",
    "encoder.relative_attention_bias.weight": "position_bias.weight",
    **per_layer(
        {
            **{f"attention.attn.{name}": f"attention.{name}" for name in "qkvo"},
            "attention.LayerNorm": "post_attention_norm",
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": "post_mlp_norm",
        },
        root="encoder.layer.{i}.",
        kinds=_BOTH,
    ),
    "embeddings.position_ids": None,
    **{f"pooler.dense.{kind}": None for kind in _BOTH},
}
WEIGHTS: WeightNames = {
    **_ENCODER,
    **{f"mpnet.{name}": to for name, to in _ENCODER.items()},
    "lm_head.bias": None,
    **{
        f"lm_head.{name}.{kind}": None
        for name in ("dense", "layer_norm", "decoder")
        for kind in _BOTH
    },
}
CLASSIFIER: WeightNames = {
    **{f"mpnet.{name}": to for name, to in _ENCODER.items()},
    **{f"classifier.dense.{kind}": f"classifier.dense.{kind}" for kind in _BOTH},
    **{f"classifier.out_proj.{kind}": f"classifier.out.{kind}" for kind in _BOTH},
}


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("pad_token_id", (1,), 1)
    config.one_of("relative_attention_num_buckets", (32,), 32)
    heads = config.integer("num_attention_heads")
    bias = PositionBias(heads=heads, buckets=32, farthest=128)
    return bert.read_encoder(config, bert.ROBERTA_OFFSET, position_bias=bias)
