"""Patterns that split a text before byte-pair encoding, and parts that families share."""

from __future__ import annotations

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LINES = r"\s*[\r\n]+"
SPACES = r"\s+(?!\S)|\s+"
# The insides of character classes: words end where an upper case letter follows a lower case one.
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def split_words(
    *, numbers: str, words: str = f"{CONTRACTIONS}|{LETTERS}", signs: str = PUNCTUATION
) -> str:
    """A pattern of words, numbers, signs and spaces."""
    return f"{words}|{numbers}|{signs}|{LINES}|{SPACES}"


def cased_words(upper: str, lower: str, endings: str) -> str:
    """A pattern of words with leading capitals, of one letter of the patterns ``upper`` and
    ``lower``."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{endings}|{first}{upper}+{lower}*{endings}"


CASED_WORDS = cased_words(f"[{UPPER}]", f"[{LOWER}]", f"{CONTRACTIONS}?")
