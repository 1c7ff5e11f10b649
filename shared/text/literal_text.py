"""A tokenizer that reads special tokens as the text that they are."""

from __future__ import annotations

import json
import secrets
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

# What is beside a special token can decide how a text is split.
_AROUND = ("{0}", " {0} ", "a{0}a", "{0}{0}", "\n{0}\n")


def literal_tokenizer(raw: RawTokenizer) -> RawTokenizer:
    """A copy of a tokenizer that makes no special token of any text."""
    literal = RawTokenizer.from_str(raw.to_str())
    literal.encode_special_tokens = True
    special = {t.content: n for n, t in raw.get_added_tokens_decoder().items() if t.special}
    if special and _finds(literal, special):
        literal = RawTokenizer.from_str(_renamed(raw.to_str(), frozenset(special)))
        literal.encode_special_tokens = True
    return literal


def _finds(literal: RawTokenizer, special: dict[str, int]) -> bool:
    """Return whether the tokenizer's model makes a special token of its own text."""
    texts = [around.format(text) for text in special for around in _AROUND]
    numbers = frozenset(special.values())
    encoded = literal.encode_batch_fast(texts, add_special_tokens=False)
    # A token for what has none is no reading of its own text.
    unknown = literal.token_to_id(getattr(literal.model, "unk_token", None) or "")
    return any(not numbers.isdisjoint({*each.ids} - {unknown}) for each in encoded)


def _renamed(tokenizer: str, special: frozenset[str]) -> str:
    """The tokenizer, whose model knows the special tokens by names that no text has."""
    content: dict[str, Any] = json.loads(tokenizer)
    nonce = secrets.token_hex(8)
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in special
    ]
    content["post_processor"] = None
    model = content["model"]

    def renamed(token: str, number: int) -> str:
        return f"\ue000{nonce}:{number}\ue001" if token in special else token

    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [
            (renamed(token, number), score) for number, (token, score) in enumerate(vocabulary)
        ]
    else:
        model["vocab"] = {renamed(token, number): number for token, number in vocabulary.items()}
    if model.get("unk_token") in special:
        unknown: str = model["unk_token"]
        model["unk_token"] = renamed(unknown, vocabulary[unknown])
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if special.isdisjoint((*pair, "".join(pair)))]
    return json.dumps(content, ensure_ascii=False)
