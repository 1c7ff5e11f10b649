"""Tokens that are bytes, spelled in GPT-2's alphabet."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from ...errors import ModelError
from ..detokenize import BYTE_LEVEL
from .tokenizer_json import MAX_TOKEN, Step, byte_pairs, merges_by_rank

_ALPHABET = {byte: character for character, byte in BYTE_LEVEL.items()}


def decode_token(text: str, number: int, origin: str) -> bytes:
    """A token from base64. Raises ``ModelError``."""
    try:
        token = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ModelError(f"{origin}: token {number} is not base64: {text[:40]!r}") from None
    if not 0 < len(token) <= MAX_TOKEN:
        raise ModelError(
            f"{origin}: token {number} has {len(token)} bytes; supported: 1 to {MAX_TOKEN}"
        )
    return token


def spell_bytes(token: bytes) -> str:
    """The bytes in GPT-2's alphabet."""
    return token.decode("latin-1").translate(_ALPHABET)


def lacks_bytes(vocabulary: Mapping[str, int]) -> bool:
    """Return whether some byte is not a token."""
    return not BYTE_LEVEL.keys() <= vocabulary.keys()


def ranked_bytes(tokens: Sequence[bytes], first: int, origin: str) -> tuple[dict[str, int], Step]:
    """The vocabulary and the BPE model of a tiktoken encoding: ``tokens`` by rank, numbered from
    ``first``. The model refers to the vocabulary, so it has tokens that are added later too.

    Raises ``ModelError``.
    """
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens, first):
        if vocabulary.setdefault(spell_bytes(token), number) != number:
            raise ModelError(f"{origin}: the token {token[:40]!r} occurs twice")
    if lacks_bytes(vocabulary):
        raise ModelError(f"{origin}: not every byte is a token, so not every text can be encoded")
    try:
        merges = merges_by_rank(vocabulary, vocabulary)
    except ValueError as error:
        raise ModelError(f"{origin}: {error}") from None
    # As in tiktoken, a part of a text that is a token is not split, whatever its merges say.
    return vocabulary, byte_pairs(vocabulary, merges, ignore_merges=True)
