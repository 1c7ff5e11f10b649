"""BERT, RoBERTa and XLM-R: bidirectional encoders, with norms over the sums of attention and
feed-forward with their inputs; for vectors of texts, or with a head that scores or labels them."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from ..spec import (
    DecoderSpec,
    NormKind,
    NormLayout,
    PositionBias,
    PositionTable,
)
from ..weight_names import WeightNames, per_layer
from .dense import read_dense, read_plain_attention, read_plain_mlp

_BOTH = ("weight", "bias")
_ENCODER: WeightNames = {
    "embeddings.word_embeddings.weight": "embed.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.token_type_embeddings.weight": "segments.weight",
    "embeddings.LayerNorm.weight": "embedding_norm.weight",
    "embeddings.LayerNorm.bias": "embedding_norm.bias",
    **per_layer(
        {
            "attention.self.query": "attention.q",
            "attention.self.key": "attention.k",
            "attention.self.value": "attention.v",
            "attention.output.dense": "attention.o",
            "attention.output.LayerNorm": "post_attention_norm",
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": "post_mlp_norm",
        },
        root="encoder.layer.{i}.",
        kinds=_BOTH,
    ),
    # Position ids, and the layer over the first token that classifiers use.
    "embeddings.position_ids": None,
    "embeddings.token_type_ids": None,
    **{f"pooler.dense.{kind}": None for kind in _BOTH},
}
# Heads for masked language modelling.
_HEADS: WeightNames = dict.fromkeys(
    (
        *("cls.predictions.bias", "lm_head.bias", "lm_head.decoder.bias", "lm_head.decoder.weight"),
        *(f"cls.predictions.decoder.{kind}" for kind in _BOTH),
        *(f"cls.predictions.transform.dense.{kind}" for kind in _BOTH),
        *(f"cls.predictions.transform.LayerNorm.{kind}" for kind in _BOTH),
        *(f"cls.seq_relationship.{kind}" for kind in _BOTH),
        *(f"lm_head.{name}.{kind}" for name in ("dense", "layer_norm") for kind in _BOTH),
    )
)
WEIGHTS: WeightNames = {
    **_ENCODER,
    **{f"{body}.{name}": to for body in ("bert", "roberta") for name, to in _ENCODER.items()},
    **_HEADS,
}
# Heads that score or label texts; BERT's first layer belongs to the encoder.
BERT_CLASSIFIER: WeightNames = {
    **{f"bert.{name}": to for name, to in _ENCODER.items()},
    **{f"bert.pooler.dense.{kind}": f"classifier.dense.{kind}" for kind in _BOTH},
    **{f"classifier.{kind}": f"classifier.out.{kind}" for kind in _BOTH},
}
ROBERTA_CLASSIFIER: WeightNames = {
    **{f"roberta.{name}": to for name, to in _ENCODER.items()},
    **{f"classifier.dense.{kind}": f"classifier.dense.{kind}" for kind in _BOTH},
    **{f"classifier.out_proj.{kind}": f"classifier.out.{kind}" for kind in _BOTH},
}
# RoBERTa's positions begin after the id of its padding token, 1.
ROBERTA_OFFSET = 2


def read(config: Config) -> DecoderSpec:
    """Read a config of BERT."""
    return read_encoder(config, 0)


def read_roberta(config: Config) -> DecoderSpec:
    """Read a config of RoBERTa or XLM-R."""
    config.one_of("pad_token_id", (1,), 1)
    return read_encoder(config, ROBERTA_OFFSET)


def read_encoder(
    config: Config,
    offset: int,
    position_bias: PositionBias | None = None,
) -> DecoderSpec:
    """Read a config of any of them; positions begin at ``offset``. A model with a position bias has
    no segments."""
    for key in ("is_decoder", "add_cross_attention"):
        config.one_of(key, (False,), False)
    config.one_of("position_embedding_type", ("absolute",), "absolute")
    for key in ("classifier_dropout", "gradient_checkpointing", "pooler_fc_size", "directionality"):
        config.get(key)
    for key in ("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"):
        config.get(key)
    config.get("pooler_type")
    layers, rows = config.integer("num_hidden_layers"), config.integer("max_position_embeddings")
    attention = replace(read_plain_attention(config), causal=False)
    spec = read_dense(
        config,
        attention,
        windows=[None] * layers,
        ropes=[None] * layers,
        mlps=[read_plain_mlp(config, "gelu")] * layers,
        norms=NormLayout.RESIDUAL,
        norm=NormKind.LAYER,
        eps_key="layer_norm_eps",
        norm_eps=1e-12,
        positions=PositionTable(rows=rows, offset=offset),
        position_bias=position_bias,
        segments=config.integer("type_vocab_size", 2) if position_bias is None else 0,
        embedding_norm=True,
        pooling="cls",
    )
    # The rows before the first position are unused.
    return replace(spec, max_position=rows - offset, tie_embeddings=False, has_head=False)
