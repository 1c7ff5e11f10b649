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


def read_vocab_txt(path: Path, added_tokens: AddedTokens) -> str:
    """Convert a ``vocab.txt`` to a ``tokenizer.json``. Raises ``ModelError``."""
    name = added_tokens.tokenizer_class or "BertTokenizer"
    if name not in _CLASSES:
        raise ModelError(
            f"{path}: the splitting pattern is unknown, since tokenizer_class in "
            f"tokenizer_config.json is {name!r:.60}; supported: {', '.join(_CLASSES)}"
        )
    if not added_tokens.flag("do_basic_tokenize", True):
        raise ModelError(f"{path}: do_basic_tokenize is false; supported: true")
    vocabulary = _vocabulary(path)
    added_tokens.default(
        **{key: text for key, text in _CLASSES[name].items() if text in vocabulary}
    )
    tokens = added_tokens.merge_into(vocabulary, str(path))
    unknown = added_tokens.token("unk_token")
    if unknown not in vocabulary:
        raise ModelError(f"{path}: has no unk_token")
    accents = added_tokens.config.get("strip_accents")
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
            "handle_chinese_chars": added_tokens.flag("tokenize_chinese_chars", True),
            "strip_accents": None if accents is None else added_tokens.flag("strip_accents", False),
            "lowercase": added_tokens.flag("do_lower_case", True),
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=added_tokens.template_processing(
            ("cls_token",), ("sep_token",), vocabulary, str(path)
        ),
        decoder={"type": "WordPiece", "prefix": _PREFIX, "cleanup": True},
    )


def _vocabulary(path: Path) -> dict[str, int]:
    lines = read_text(path).removesuffix("\n").split("\n")
    if len(lines) > MAX_TOKENS:
        raise ModelError(f"{path}: has more than {MAX_TOKENS} tokens")
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        if token:  # a few published files have empty lines
            # The last id of a duplicate token counts, as in transformers.
            vocabulary[check_token(token, number, str(path))] = number
    return vocabulary
