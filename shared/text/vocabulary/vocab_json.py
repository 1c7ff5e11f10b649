"""GPT-2's files: ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelError
from ..model_files import read_json_object, read_text
from .added_tokens import AddedTokens
from .byte_spelling import lacks_bytes
from .tiktoken import QWEN_PATTERN
from .tokenizer_json import (
    MAX_MERGES,
    MAX_TOKENS,
    Merge,
    byte_level,
    byte_pairs,
    check_token,
    split_by,
    tokenizer_json,
)

_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class _Class:
    """What a tokenizer's class adds to the two files. Without a ``pattern``, text is split by
    GPT-2's."""

    names: tuple[tuple[str, str], ...]
    pattern: str | None = None
    nfc: bool = False
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


_GPT2 = _Class(names=(("bos_token", _END), ("eos_token", _END), ("unk_token", _END)))
_ROBERTA = _Class(
    names=(
        *(("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")),
        *(("cls_token", "<s>"), ("sep_token", "</s>"), ("pad_token", "<pad>")),
        ("mask_token", "<mask>"),
    ),
    first=("cls_token",),
    last=("sep_token",),
)
_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "Qwen2Tokenizer": _Class(
        names=(("eos_token", _END), ("pad_token", _END), ("unk_token", _END)),
        pattern=QWEN_PATTERN,
        nfc=True,
    ),
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
}


def read_vocab_json(path: Path, added_tokens: AddedTokens) -> str:
    """Convert a ``vocab.json`` and the ``merges.txt`` beside it to a ``tokenizer.json``. Raises
    ``ModelError``."""
    kind = _class_of(path, added_tokens)
    vocabulary = _vocabulary(path)
    merges = _merges(path.with_name("merges.txt"), vocabulary)
    added_tokens.default(**{key: text for key, text in kind.names if text in vocabulary})
    tokens = added_tokens.merge_into(vocabulary, str(path))
    unknown = added_tokens.token("unk_token")
    if unknown not in vocabulary:
        unknown = None
    if unknown is None and lacks_bytes(vocabulary):
        raise ModelError(
            f"{path}: not every byte is a token, and there is no unk_token for the others"
        )
    first = kind.first or (("bos_token",) if added_tokens.flag("add_bos_token", False) else ())
    last = kind.last or (("eos_token",) if added_tokens.flag("add_eos_token", False) else ())
    add_prefix_space = added_tokens.flag("add_prefix_space", False)
    return tokenizer_json(
        byte_pairs(vocabulary, merges, unk_token=unknown),
        added=tokens,
        normalizer={"type": "NFC"} if kind.nfc else None,
        pre_tokenizer=(
            byte_level(use_regex=True, add_prefix_space=add_prefix_space)
            if kind.pattern is None
            else split_by(kind.pattern)
        ),
        post_processor=added_tokens.template_processing(first, last, vocabulary, str(path)),
        decoder=byte_level(use_regex=True),
    )


def _class_of(path: Path, added_tokens: AddedTokens) -> _Class:
    name = added_tokens.tokenizer_class or "GPT2Tokenizer"
    if name not in _CLASSES:
        raise ModelError(
            f"{path}: the splitting pattern is unknown, since tokenizer_class in "
            f"tokenizer_config.json is {name!r:.60}; supported: {', '.join(_CLASSES)}"
        )
    return _CLASSES[name]


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json_object(path)
    tokens: dict[int, str] = {}
    for token, number in vocabulary.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise ModelError(f"{path}: {token[:40]!r} must have a number, not {number!r:.40}")
        if not 0 <= number < MAX_TOKENS:
            raise ModelError(f"{path}: {number} is not a token id")
        check_token(token, number, str(path))
        if (other := tokens.setdefault(number, token)) != token:
            raise ModelError(
                f"{path}: {other[:40]!r} and {token[:40]!r} both have the number {number}"
            )
    if not vocabulary:
        raise ModelError(f"{path}: has no tokens")
    return vocabulary


def _merges(path: Path, vocabulary: dict[str, int]) -> list[Merge]:
    if not path.is_file():
        raise ModelError(f"{path} does not exist, which vocab.json needs: download it too")
    merges: list[Merge] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ModelError(
                f"{path}: line {number} has {line[:40]!r}, which is not a pair of tokens that "
                f"concatenate to a token"
            )
        merges.append((left, right))
        if len(merges) > MAX_MERGES:
            raise ModelError(f"{path}: has more than {MAX_MERGES} merges")
    return merges
