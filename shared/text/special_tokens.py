"""The special tokens that tokenizer_config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, which templates use by name."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
