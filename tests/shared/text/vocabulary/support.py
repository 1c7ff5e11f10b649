"""What the tests of vocabularies share: awkward texts, and small files of each kind."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.shared.text.detokenize import BYTE_LEVEL
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files

MODELS = Path(__file__).parent / "models"

AWKWARD = (
    *("", " ", "   ", "a", " a", "a ", "  a  b  ", "Hello world", "Hello\nworld", "\n", "\n\n"),
    *("a\r\nb", "\t", "\ta\t\tb", "x\u00a0y", "\u3000\uff21\uff22", "a\u200bb", "\u200d"),
    *(
        "👨‍👩‍👧‍👦",
        "👩🏽‍💻 hi",
        "🇩🇪🇫🇷",
        "你好世界",
        "日本語。",
        "한국어",
        "e\u0301",
        "é",
        "É\u200d|",
        "q\u0323",
    ),
    *(
        "\0",
        "a\0b",
        "\ufeff",
        "\ufeffBOM",
        "<s>",
        "</s>",
        "<unk>",
        "<s>hi</s>",
        "[INST] hi [/INST]",
    ),
    *("<0x0A>", "a<0x41>b", "\u2581", "a\u2581b", "def f(x):\n    return x  # two\n", "12345 3.14"),
    *("don't I'LL", "straße Ελληνικά русский", "العربية", "हिन्दी", " " * 40, "=-" * 20),
    *("\U0001f9ff\U00013000", "\u2028x", "\x01\x1f", "<x>", "a<x>b <x>", "fox<start_of_turn>fox"),
    *("\ufffd", "zero\u200cjoin", "a\u0302\u0323"[:2], "Fox FOX fox", "x" * 300),
)


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder."""
    return Tokenizer.load(read_tokenizer_files(folder))


def write(folder: Path, **files: Any) -> Path:
    """Write files, whose names have ``_dot_`` for a dot: bytes, a text, or a value as JSON."""
    for name, content in files.items():
        path = folder / name.replace("_dot_", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def byte_tokens(*more: str) -> list[bytes]:
    """All bytes, and then more tokens, each of which two earlier ones make."""
    return [bytes([byte]) for byte in range(256)] + [token.encode() for token in more]


def ranks(tokens: Sequence[bytes]) -> str:
    """A file of tiktoken."""
    return "".join(
        f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)
    )


# The special tokens of tekken.json from v11 on, as far as chats have them.
TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)
MERGED = ("th", "he", "the", " t", " the", "in", "ing", "  ", "    ", "\n\n", "fo", "fox", "é")
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# Tokens of tiktoken's files, and how each family splits a text before they are merged.
TOKENS = byte_tokens(*MERGED, "你", "你好", "'t", "日本", "I'", "LL", "'LL", "12", "123", "\r\n")
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = rf"[\p{{Han}}]+|{_UPPER}*{_LOWER}+{_SHORT}?|{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}{_END}"
QWEN = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_END}"
LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_END}"
LLAMA4 = (
    KIMI.replace("&&[^\\p{Han}]", "")
    .replace("[\\p{Han}]+|", "")
    .replace("+[\\r\\n]*", "+[\\r\\n/]*")
)
FAMILIES = {"tiktoken.model": KIMI, "qwen.tiktoken": QWEN, "llama3": LLAMA3, "llama4": LLAMA4}
TEXTS = (*AWKWARD, "你好世界HELLO日本", "I'LL don't 1234567 a/b//\n")


def tekken(version: str, special: Sequence[str] | None = TEKKEN_SPECIAL) -> dict[str, Any]:
    """A small ``tekken.json``."""
    tokens = byte_tokens(*MERGED)
    values: dict[str, Any] = {
        "config": {
            "pattern": _PATTERN,
            "num_vocab_tokens": len(tokens) + 1,
            "default_vocab_size": 30 + len(tokens),
            "default_num_special_tokens": 30,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*tokens, b"beyond"])
        ],
    }
    if special is not None:
        values["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ]
    return values


def spell_bytes(token: bytes) -> str:
    """A token in GPT-2's alphabet of bytes."""
    letters = {byte: letter for letter, byte in BYTE_LEVEL.items()}
    return "".join(letters[byte] for byte in token)


def in_steps(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens that come one by one."""
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
