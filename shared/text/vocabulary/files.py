"""Tokenizer files, the preferred one first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..model_files import MAX_TOKENIZER_JSON, read_text
from .added_tokens import AddedTokens
from .sentencepiece import read_sentencepiece
from .tekken import Tekken
from .tekken_chat import tekken_chat
from .tiktoken import is_ranks, read_tiktoken
from .vocab_json import read_vocab_json
from .vocab_txt import read_vocab_txt

TOKENIZER_JSON = "tokenizer.json"
_TEKKEN = "tekken.json"
_TIKTOKEN = ("tiktoken.model", "qwen.tiktoken")
# Llama's, T5's and ALBERT's, and XLM-RoBERTa's.
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_VOCAB_JSON, _VOCAB_TXT = "vocab.json", "vocab.txt"
_IN_ORDER = (TOKENIZER_JSON, _TEKKEN, *_TIKTOKEN, *_PIECES, _VOCAB_JSON, _VOCAB_TXT)
# All files of a tokenizer, besides its templates and configuration.
TOKENIZER_FILES = (*_IN_ORDER, "merges.txt", "added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the content of a ``tokenizer.json``, converted from the file ``origin`` unless
    it is one. ``config`` is the folder's, with defaults from that file; ``template`` is the chat
    template that the file implies."""

    tokenizer: str
    origin: str
    config: Mapping[str, Any]
    template: str | None = None


class Kind(StrEnum):
    """The library or algorithm that a file is for."""

    TOKENIZERS = "Hugging Face tokenizers"
    TEKKEN = "tekken"
    TIKTOKEN = "tiktoken"
    SENTENCEPIECE = "SentencePiece"
    BPE = "byte-level BPE"
    WORDPIECE = "WordPiece"


_KINDS = {
    TOKENIZER_JSON: Kind.TOKENIZERS,
    _TEKKEN: Kind.TEKKEN,
    **dict.fromkeys(_TIKTOKEN, Kind.TIKTOKEN),
    **dict.fromkeys(_PIECES, Kind.SENTENCEPIECE),
    _VOCAB_JSON: Kind.BPE,
    _VOCAB_TXT: Kind.WORDPIECE,
}


def kind_of(path: Path) -> Kind:
    """The kind of a file from ``find_vocabulary``, by its name: except that a file named like
    SentencePiece's may be tiktoken's."""
    kind = _KINDS[path.name]
    if kind is Kind.SENTENCEPIECE and is_ranks(_beginning(path)):
        return Kind.TIKTOKEN
    return kind


def find_vocabulary(folder: Path) -> Path | None:
    """The tokenizer file of a folder."""
    paths = (folder / name for name in _IN_ORDER)
    return next((path for path in paths if path.is_file()), None)


def read_vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read the tokenizer of a model folder. Raises ``ModelError``."""
    path = find_vocabulary(folder)
    if path is None:
        raise ModelError(
            f"{folder / TOKENIZER_JSON} does not exist; a model folder needs a tokenizer: download "
            f"it too (one of {', '.join(_IN_ORDER)})"
        )
    kind = kind_of(path)
    if kind is Kind.TOKENIZERS:
        return Vocabulary(read_text(path, MAX_TOKENIZER_JSON), str(path), config)
    added_tokens = AddedTokens(folder, config)
    template = None
    if kind is Kind.TEKKEN:
        tekken = Tekken(path)
        content = tekken.tokenizer_json(added_tokens)
        template = tekken_chat(tekken.version, tekken.special)
    elif kind is Kind.TIKTOKEN:
        content = read_tiktoken(path, added_tokens)
    elif kind is Kind.SENTENCEPIECE:
        content = read_sentencepiece(path, added_tokens)
    elif kind is Kind.BPE:
        content = read_vocab_json(path, added_tokens)
    else:
        content = read_vocab_txt(path, added_tokens)
    return Vocabulary(content, str(path), added_tokens.config, template)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as content:
        return content.read(1024)
