"""Rules for splitting texts before byte-pair encoding, by their names in GGUF files.

llama.cpp and the ``tokenizer.json`` of each model spell them differently; where results differ,
these follow the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...text.vocabulary.split_patterns import (
    CASED_SIGNS,
    CASED_WORDS,
    CONTRACTIONS,
    LETTERS,
    LINES,
    LOWER,
    PUNCTUATION,
    SPACES,
    UPPER,
    cased_words,
    split_words,
)

_LETTERS_AND_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
# From the right, as numbers are grouped.
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"

_DEEPSEEK3_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+"
)
# Letters of alphabets with two cases.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹ"
    "ℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_SOUTH_AND_EAST_ASIAN = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ff"
    "\u1000-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7af\u1100-ᇿ]+"
)


@dataclass(frozen=True, slots=True)
class SplittingRule:
    """``patterns`` split a text, each the parts from the one before.

    ``nfc``: texts are normalised to NFC first. ``whole_words``: a part that is a token is not built
    by merges. ``adds_bos``: texts begin with the bos token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """The rule as in a ``tokenizer.json``."""
        splits: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        last = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, last]}


def _rule(*patterns: str) -> SplittingRule:
    return SplittingRule(patterns)


_DIGITS_GPT2 = _rule(_DIGIT, _GPT2)
_LLAMA3 = replace(_rule(split_words(numbers=r"\p{N}{1,3}")), whole_words=True, adds_bos=True)
_QWEN2 = replace(_rule(split_words(numbers=_DIGIT)), nfc=True)
_GPT4O = _rule(split_words(words=CASED_WORDS, numbers=r"\p{N}{1,3}", signs=CASED_SIGNS))
_DEEPSEEK3 = _rule(r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3_WORDS}[\r\n]*|{LINES}|{SPACES}")
_NOT_HAN = r"(?:(?!\p{{Han}}){})"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = _rule(rf"'(?i:[sdmt]|ll|ve|re)|{LETTERS}|{_DIGIT}|{PUNCTUATION}|\s*[\r\n]|{SPACES}")

DEFAULT = "default"
_BY_NAMES = {
    "default": _rule(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, _DIGITS, _THREE_DIGITS),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum "
    "exaone4 jais trillion granite-docling jina-v1-en jina-v2-code roberta-bpe": _rule(_GPT2),
    "mpt olmo modern-bert": replace(_rule(_GPT2), nfc=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": _DIGITS_GPT2,
    "command-r": replace(_DIGITS_GPT2, nfc=True),
    "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3,
    "smaug-bpe dbrx chatglm-bpe": replace(_LLAMA3, whole_words=False, adds_bos=False),
    "glm4 glm5": replace(_LLAMA3, adds_bos=False),
    "minicpm5": replace(_rule(r"\p{N}{1,3}", split_words(numbers=_DIGITS)), whole_words=True),
    "jais-2": _rule(
        f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}{{1,3}}|{PUNCTUATION}|{LINES}|"
        + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
        + r"|\s{1,2}(?!\S)|\s{1}"
    ),
    "qwen2 deepseek-r1-qwen f2llmv2": _QWEN2,
    "stablelm2 kormo megrez hunyuan solar-open grok-2": replace(_QWEN2, nfc=False),
    "qwen35": replace(
        _rule(
            split_words(
                words=f"{CONTRACTIONS}|{_LETTERS_AND_MARKS}",
                numbers=_DIGIT,
                signs=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            )
        ),
        nfc=True,
    ),
    "ufakzeka": _rule(split_words(words=LETTERS, numbers=_DIGIT)),
    "laguna": _rule(r"[^\n]+|[\n]+", split_words(numbers=_DIGIT)),
    "seed-coder": _rule(split_words(numbers=_DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+")),
    "exaone-moe": _rule(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}"
    ),
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "tekken": replace(
        _rule(
            split_words(
                words=cased_words(f"[{UPPER}]", f"[{LOWER}]", ""), numbers=_DIGIT, signs=CASED_SIGNS
            )
        ),
        whole_words=True,
        adds_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O,
    "granite-embed-multi-97m": replace(_GPT4O, whole_words=True),
    "tiny_aya cohere2moe": _rule(r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns),
    "kimi-k2": _rule(
        split_words(
            words=r"\p{Han}+|"
            + cased_words(
                _NOT_HAN.format(f"[{UPPER}]"), _NOT_HAN.format(f"[{LOWER}]"), f"{CONTRACTIONS}?"
            ),
            numbers=r"\p{N}{1,3}",
        )
    ),
    "youtu": replace(
        _rule(
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK,
            split_words(words=CASED_WORDS, numbers=_DIGIT, signs=CASED_SIGNS),
        ),
        whole_words=True,
    ),
    "deepseek-llm": _rule(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-\ud7ff]+",
        _DIGITS,
    ),
    "deepseek-coder": _rule(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGIT),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK3,
    "spark2_5": _rule(r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3_WORDS}|[\r\n]|{SPACES}", _DIGIT),
    "afmoe": _rule(_THOUSANDS, _SOUTH_AND_EAST_ASIAN, _DEEPSEEK3.patterns[-1]),
    "falcon": _rule(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS),
    "poro-chat bloom gpt3-finnish": _rule(_BLOOM),
    "viking": _rule(_BLOOM, _DIGIT),
    "superbpe": _rule(_DIGITS, r"(?=(\d{3})+(?!\d))"),
    "chameleon": replace(
        _rule(
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
}
RULES = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}
# Rules by which, as in SentencePiece, spaces become "\u2581" and bytes stay characters; merges are
# applied to the whole text.
UNSPLIT = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
