"""Heads that score or label texts, of any family."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..config_files import LOGIT_SCORE
from ..spec import (
    ClassifierLayer,
    ClassifierSpec,
    Pooling,
    ScoreActivation,
    TokenScoreSpec,
)
from ..weight_names import WeightNames

# The head of a decoder, as saved by transformers.
SCORE_WEIGHTS: WeightNames = {"score.weight": "classifier.out.weight"}
# Keys that belong to heads and not to families.
HEAD_KEYS = frozenset(
    {"sentence_transformers", "sbert_ce_default_activation_function", LOGIT_SCORE}
    | {"classifier_from_token", "is_original_qwen3_reranker", "method"}
)
# Activations of sentence-transformers that are supported.
_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "none",
}
# Activations by problem type, as in transformers' losses and vLLM's classifiers.
_PROBLEMS: dict[str, ScoreActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_MAX_LABELS = 1 << 14


def read_decoder_head(config: Config) -> ClassifierSpec:
    """The head of a decoder: over the last token."""
    return _read(config, "last", None, bias=False)


def read_encoder_head(config: Config) -> ClassifierSpec:
    """The head of BERT and similar encoders: over the first token, with a layer before."""
    return _read(config, "cls", ClassifierLayer(activation="tanh"))


def read_pooled_head(config: Config, pooling: Pooling, layer: ClassifierLayer) -> ClassifierSpec:
    """A head over any pooling, with a layer before."""
    return _read(config, pooling, layer)


def read_token_score(config: Config) -> TokenScoreSpec:
    """The tokens whose logits are a decoder's score, by sentence-transformers' ``LogitScore``."""
    values = config.get(LOGIT_SCORE)
    if not isinstance(values, dict):
        raise config.refusal(LOGIT_SCORE, values, "a table of LogitScore")
    table, vocabulary = config.table(LOGIT_SCORE, values), config.integer("vocab_size")
    table.one_of("module_input_name", ("causal_logits",), "causal_logits")
    true = table.count("true_token_id")
    false = None if table.get("false_token_id") is None else table.count("false_token_id")
    for key, token in (("true_token_id", true), ("false_token_id", false)):
        if token is not None and token >= vocabulary:
            raise table.refusal(key, token, f"a token id below {vocabulary}")
    table.finish()
    return TokenScoreSpec(true=true, false=false, activation=_activation(config, 1))


def _read(
    config: Config, pooling: Pooling, layer: ClassifierLayer | None, *, bias: bool = True
) -> ClassifierSpec:
    labels = _labels(config)
    return ClassifierSpec(
        labels=labels,
        activation=_activation(config, len(labels)),
        pooling=pooling,
        layer=layer,
        bias=bias,
    )


def _labels(config: Config) -> tuple[str, ...]:
    """The names of the labels in order; transformers' own names by default."""
    names = config.get("id2label")
    if not isinstance(names, dict):
        count = config.integer("num_labels", 2, at_most=_MAX_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    by_index = {str(key): value for key, value in names.items()}
    if not 0 < len(by_index) <= _MAX_LABELS or set(by_index) != set(map(str, range(len(by_index)))):
        supported = f"names of labels from 0 on, at most {_MAX_LABELS}"
        raise config.refusal("id2label", names, supported)
    return tuple(str(by_index[str(index)]) for index in range(len(by_index)))


def _activation(config: Config, labels: int) -> ScoreActivation:
    """The activation that the model's files name, as in vLLM; by default a probability."""
    table = config.get("sentence_transformers", {})
    older = config.get("sbert_ce_default_activation_function")
    name: Any = table.get("activation_fn", older) if isinstance(table, dict) else table
    if name is not None:
        if name not in _ACTIVATIONS:
            raise config.refusal("sentence_transformers", name, " or ".join(_ACTIVATIONS))
        return _ACTIVATIONS[name]
    problem = config.get("problem_type")
    if problem is not None:
        activation = _PROBLEMS[config.one_of("problem_type", tuple(_PROBLEMS))]
        if activation != "softmax" or labels > 1:
            return activation
    return "sigmoid" if labels == 1 else "softmax"
