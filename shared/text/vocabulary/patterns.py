"""The patterns by which families split a text before byte-pair encoding."""

from __future__ import annotations

_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(but: str = "") -> str:
    """Words whose capitals come first, of all letters ``but`` some."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    before, after = r"[^\r\n\p{L}\p{N}]?", f"{_SHORTENED}?"
    return f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"


QWEN = "|".join((_SHORTENED, _WORD, r"\p{N}", _PUNCTUATION, _SPACES))
LLAMA3 = "|".join((_SHORTENED, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACES))
LLAMA4 = "|".join((_cased(), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))
KIMI = "|".join((r"[\p{Han}]+", _cased(r"&&[^\p{Han}]"), r"\p{N}{1,3}", _PUNCTUATION, _SPACES))
