"""The parts of a ``tokenizer.json``, from which the tokenizers library builds a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import ModelError

# SentencePiece's spelling of a space.
SPACE = "\u2581"
# Characters in a token; the longest published ones are runs of a few hundred spaces.
MAX_TOKEN = 1024
# Ten times the largest published vocabulary.
MAX_TOKENS = 1 << 22
MAX_MERGES = 1 << 23

Step = dict[str, Any]
Merge = tuple[str, str]


def tokenizer_json(
    model: Step,
    *,
    added: Sequence[Mapping[str, Any]],
    decoder: Step,
    normalizer: Step | None = None,
    pre_tokenizer: Step | None = None,
    post_processor: Step | None = None,
) -> str:
    """The whole file."""
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(parts, ensure_ascii=False)


def byte_pairs(vocabulary: Mapping[str, int], merges: Iterable[Merge], **options: Any) -> Step:
    """A byte-pair encoding model; ``merges`` are in the order of their ranks."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [*merges],
        **options,
    }


def merges_by_rank(tokens: Iterable[str], vocabulary: Mapping[str, int]) -> list[Merge]:
    """All pairs of tokens that concatenate to a token, in the order ``tokens`` of the results: the
    pair whose result comes first is merged first, as in SentencePiece and tiktoken.

    Raises ``ValueError`` if there are too many.
    """
    merges: list[Merge] = []
    for token in tokens:
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += pairs
        if len(merges) > MAX_MERGES:
            raise ValueError(f"its tokens can be merged from others in more than {MAX_MERGES} ways")
    return merges


def sequence(kind: str, steps: Sequence[Step]) -> Step | None:
    """Several steps as one; ``kind`` names their list."""
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": "Sequence", kind: [*steps]}


def replace_step(pattern: str, content: str, *, regex: bool = False) -> Step:
    """A step that replaces text."""
    kind = "Regex" if regex else "String"
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split_by(pattern: str) -> Step:
    """A step that splits text into the matches of a pattern and the texts between them, and spells
    the bytes in GPT-2's alphabet."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]}


def byte_level(*, use_regex: bool, add_prefix_space: bool = False) -> Step:
    """GPT-2's alphabet of bytes, with its own pattern if ``use_regex``."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def template_processing(
    first: Sequence[str], last: Sequence[str], ids: Mapping[str, int]
) -> Step | None:
    """The step that puts special tokens before and after every text."""
    if not first and not last:
        return None
    tokens = list(dict.fromkeys((*first, *last)))

    def special(token: str, text: int) -> Step:
        return {"SpecialToken": {"id": token, "type_id": text}}

    def around(name: str, text: int) -> list[Step]:
        middle = {"Sequence": {"id": name, "type_id": text}}
        before, after = (
            [special(token, text) for token in first],
            [special(token, text) for token in last],
        )
        return [*before, middle, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens
        },
    }


def check_token(token: str, number: int, origin: str) -> str:
    """Return ``token``. Raises ``ModelError`` if it is empty or too long."""
    if not token:
        raise ModelError(f"{origin}: token {number} is empty")
    if len(token) > MAX_TOKEN:
        raise ModelError(
            f"{origin}: token {number} has {len(token)} characters or bytes; supported: at most "
            f"{MAX_TOKEN}"
        )
    return token


def number_tokens(tokens: Iterable[str], origin: str) -> dict[str, int]:
    """The index of each token. Raises ``ModelError`` for a duplicate."""
    numbers: dict[str, int] = {}
    for number, token in enumerate(tokens):
        other = numbers.setdefault(check_token(token, number, origin), number)
        if other != number:
            raise ModelError(f"{origin}: tokens {other} and {number} are the same, {token[:40]!r}")
        if number >= MAX_TOKENS:
            raise ModelError(f"{origin}: has more than {MAX_TOKENS} tokens")
    return numbers
