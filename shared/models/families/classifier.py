"""Heads that score or label texts, of any family."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..model_config import LOGIT_SCORE
from ..spec import (
    ClassifierLayer,
    ClassifierSpec,
    Pooling,
    ScoreActivation,
    TokenScoreSpec,
)
from ..weight_names import WeightNames

# Of a decoder as transformers saves one with such a head.
SCORE_WEIGHTS: WeightNames = {"score.weight": "classifier.out.weight"}
# Keys that only heads have, of which families know nothing.
HEAD_KEYS = frozenset(
    {"sentence_transformers", "sbert_ce_default_activation_function", LOGIT_SCORE}
    | {"classifier_from_token", "is_original_qwen3_reranker", "method"}
)
# Where sentence-transformers keeps the function that makes scores of logits, and those read.
_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "none",
}
# What problems are for transformers' losses, and vLLM's classifiers.
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
    """The head of BERT and its like: over the first token, with a layer before."""
    return _read(config, "cls", ClassifierLayer(activation="tanh"))


def read_pooled_head(config: Config, pooling: Pooling, layer: ClassifierLayer) -> ClassifierSpec:
    """A head over any pooling, with a layer before."""
    return _read(config, pooling, layer)


def read_token_score(config: Config) -> TokenScoreSpec:
    """The tokens of a decoder whose next token is an answer, as sentence-transformers'
    ``LogitScore`` names them."""
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
    """The names of the labels in their order; transformers' own for those without."""
    named = config.get("id2label")
    if not isinstance(named, dict):
        count = config.integer("num_labels", 2, at_most=_MAX_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    listed = {str(key): value for key, value in named.items()}
    if not 0 < len(listed) <= _MAX_LABELS or set(listed) != set(map(str, range(len(listed)))):
        known = f"names of labels from 0 on, at most {_MAX_LABELS}"
        raise config.refusal("id2label", named, known)
    return tuple(str(listed[str(index)]) for index in range(len(listed)))


def _activation(config: Config, labels: int) -> ScoreActivation:
    """What the model's files name, as vLLM understands them; else a probability."""
    table = config.get("sentence_transformers", {})
    older = config.get("sbert_ce_default_activation_function")
    name: Any = table.get("activation_fn", older) if isinstance(table, dict) else table
    if name is not None:
        if name not in _ACTIVATIONS:
            raise config.refusal("sentence_transformers", name, " or ".join(_ACTIVATIONS))
        return _ACTIVATIONS[name]
    problem = config.get("problem_type")
    if problem is not None:
        found = _PROBLEMS[config.one_of("problem_type", tuple(_PROBLEMS))]
        if found != "softmax" or labels > 1:
            return found
    return "sigmoid" if labels == 1 else "softmax"
