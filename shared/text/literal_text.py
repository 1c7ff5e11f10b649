"""A tokenizer that encodes special tokens literally, as plain text."""

from __future__ import annotations

import json
import secrets
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

# The text around a special token can decide how it is split.
_AROUND = ("{0}", " {0} ", "a{0}a", "{0}{0}", "\n{0}\n")


def literal_tokenizer(raw: RawTokenizer) -> RawTokenizer:
    """A copy of a tokenizer that encodes no text as a special token."""
    literal = RawTokenizer.from_str(raw.to_str())
    literal.encode_special_tokens = True
    special = {t.content: n for n, t in raw.get_added_tokens_decoder().items() if t.special}
    if special and _encodes_special(literal, special):
        literal = RawTokenizer.from_str(_rename_special(raw.to_str(), frozenset(special)))
        literal.encode_special_tokens = True
    return literal


def _encodes_special(literal: RawTokenizer, special: dict[str, int]) -> bool:
    """Return whether the tokenizer's model encodes the text of a special token as that token."""
    texts = [around.format(text) for text in special for around in _AROUND]
    numbers = frozenset(special.values())
    encodings = literal.encode_batch_fast(texts, add_special_tokens=False)
    # The unknown token stands for other texts than its own.
    unknown = literal.token_to_id(getattr(literal.model, "unk_token", None) or "")
    return any(not numbers.isdisjoint({*each.ids} - {unknown}) for each in encodings)


def _rename_special(tokenizer: str, special: frozenset[str]) -> str:
    """The tokenizer's JSON, with special tokens renamed in its model so that no text has them."""
    content: dict[str, Any] = json.loads(tokenizer)
    nonce = secrets.token_hex(8)
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in special
    ]
    content["post_processor"] = None
    model = content["model"]

    def rename(token: str, number: int) -> str:
        return f"\ue000{nonce}:{number}\ue001" if token in special else token

    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [
            (rename(token, number), score) for number, (token, score) in enumerate(vocabulary)
        ]
    else:
        model["vocab"] = {rename(token, number): number for token, number in vocabulary.items()}
    if model.get("unk_token") in special:
        unknown: str = model["unk_token"]
        model["unk_token"] = rename(unknown, vocabulary[unknown])
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if special.isdisjoint((*pair, "".join(pair)))]
    return json.dumps(content, ensure_ascii=False)
