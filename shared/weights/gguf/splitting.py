"""Rules by which texts are split before byte-pair encoding, by their names in GGUF files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# Words with a character before them, numbers by themselves, punctuation, and white space that keeps
# its last space for the next word.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, slots=True)
class SplittingRule:
    """``pattern`` splits a text; without one, GPT-2's does, after single digits if ``digits``.

    ``whole_words``: a part that is a token is not built by merges. ``begins``: texts begin with the
    bos token unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    normalises: bool = False
    whole_words: bool = False
    begins: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """The rule as in a ``tokenizer.json``."""
        parts: list[dict[str, Any]] = []
        if self.digits:
            parts.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            parts.append(
                {
                    "type": "Split",
                    "pattern": {"Regex": self.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
        last = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.pattern is None,
        }
        return {"type": "Sequence", "pretokenizers": [*parts, last]} if parts else last


def _pattern(words: str, numbers: str, punctuation: str = _PUNCTUATION) -> str:
    return f"{words}|{numbers}|{punctuation}|{_SPACES}"


_LLAMA3 = SplittingRule(
    _pattern(f"{_CONTRACTIONS}|{_WORDS}", r"\p{N}{1,3}"), whole_words=True, begins=True
)
_QWEN2 = SplittingRule(_pattern(f"{_CONTRACTIONS}|{_WORDS}", r"\p{N}"), normalises=True)
RULES = {
    "gpt-2": SplittingRule(),
    "smollm": SplittingRule(digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": replace(_LLAMA3, begins=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": SplittingRule(
        _pattern(_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"), whole_words=True, begins=True
    ),
}
