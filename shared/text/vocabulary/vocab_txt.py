"""BERT's ``vocab.txt``: words and their ends, a line each."""

from __future__ import annotations

from pathlib import Path

from ...errors import ModelError
from ..model_files import read_text
from .added_tokens import AddedTokens
from .tokenizer_json import MAX_TOKENS, check_token, tokenizer_json

_PREFIX = "##"
_MAX_WORD = 100
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "cls_token": "[CLS]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_MPNET = {
    "unk_token": "[UNK]",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "mask_token": "<mask>",
}
_CLASSES = {
    "BertTokenizer": _BERT,
    "ConvBertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT,
    "ElectraTokenizer": _BERT,
    "MPNetTokenizer": _MPNET,
    "MobileBertTokenizer": _BERT,
}


def read_vocab_txt(path: Path, added: AddedTokens) -> str:
    """The ``tokenizer.json`` of a ``vocab.txt``. Raises ``ModelError``."""
    name = added.tokenizer_class or "BertTokenizer"
    if name not in _CLASSES:
        raise ModelError(
            f"{path}: the rule by which texts are split is unknown, since tokenizer_class in "
            f"tokenizer_config.json is {name!r:.60}; known: {', '.join(_CLASSES)}"
        )
    if not added.flag("do_basic_tokenize", True):
        raise ModelError(f"{path}: do_basic_tokenize is false; supported: true")
    vocabulary = _vocabulary(path)
    added.default(**{key: text for key, text in _CLASSES[name].items() if text in vocabulary})
    tokens = added.joined(vocabulary, str(path))
    unknown = added.token("unk_token")
    if unknown not in vocabulary:
        raise ModelError(f"{path}: has no unk_token")
    accents = added.config.get("strip_accents")
    return tokenizer_json(
        {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": _PREFIX,
            "max_input_chars_per_word": _MAX_WORD,
            "vocab": vocabulary,
        },
        added=tokens,
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": added.flag("tokenize_chinese_chars", True),
            "strip_accents": None if accents is None else added.flag("strip_accents", False),
            "lowercase": added.flag("do_lower_case", True),
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=added.ends(("cls_token",), ("sep_token",), vocabulary, str(path)),
        decoder={"type": "WordPiece", "prefix": _PREFIX, "cleanup": True},
    )


def _vocabulary(path: Path) -> dict[str, int]:
    lines = read_text(path).removesuffix("\n").split("\n")
    if len(lines) > MAX_TOKENS:
        raise ModelError(f"{path}: has more than {MAX_TOKENS} tokens")
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        if token:  # a few published files have empty lines, which no text can be
            # Of a token that occurs twice, the last number counts, as in transformers.
            vocabulary[check_token(token, number, str(path))] = number
    return vocabulary
