"""The files that a tokenizer may be in, of which the first one counts."""

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
# The last two are those of T5 and ALBERT, and of XLM-RoBERTa.
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_VOCAB_JSON, _VOCAB_TXT = "vocab.json", "vocab.txt"
_IN_ORDER = (TOKENIZER_JSON, _TEKKEN, *_TIKTOKEN, *_PIECES, _VOCAB_JSON, _VOCAB_TXT)
# All that a tokenizer is read from, besides its templates and configuration.
TOKENIZER_FILES = (*_IN_ORDER, "merges.txt", "added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``tokenizer`` is the JSON of a ``tokenizer.json``, made of the file ``origin``; ``config`` is
    that of the folder, with what the file says. ``template`` is that of chats whose form the file
    names."""

    tokenizer: str
    origin: str
    config: Mapping[str, Any]
    template: str | None = None


class Kind(StrEnum):
    """The libraries, or the algorithms, whose files these are."""

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
    """The kind of a file that ``find_vocabulary`` has found: by its name, but what is named as
    SentencePiece's may be tiktoken's."""
    kind = _KINDS[path.name]
    if kind is Kind.SENTENCEPIECE and is_ranks(_beginning(path)):
        return Kind.TIKTOKEN
    return kind


def find_vocabulary(folder: Path) -> Path | None:
    """The file of a folder's tokenizer."""
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
    added = AddedTokens(folder, config)
    template = None
    if kind is Kind.TEKKEN:
        tekken = Tekken(path)
        made = tekken.tokenizer_json(added)
        template = tekken_chat(tekken.version, tekken.special)
    elif kind is Kind.TIKTOKEN:
        made = read_tiktoken(path, added)
    elif kind is Kind.SENTENCEPIECE:
        made = read_sentencepiece(path, added)
    elif kind is Kind.BPE:
        made = read_vocab_json(path, added)
    else:
        made = read_vocab_txt(path, added)
    return Vocabulary(made, str(path), added.config, template)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as content:
        return content.read(1024)
