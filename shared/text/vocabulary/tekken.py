"""Mistral's ``tekken.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..model_files import read_json_object
from .added_tokens import AddedTokens, entry
from .byte_spelling import decode_token, ranked_bytes
from .tokenizer_json import (
    MAX_TOKENS,
    byte_level,
    check_token,
    split_by,
    tokenizer_json,
)

_BOS = "<s>"
# Special tokens of versions up to v7, whose files do not list them.
_OLDER = (
    *("<unk>", _BOS, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_OLDER_VERSIONS = ("v1", "v2", "v3", "v7")


class Tekken:
    """The content of a ``tekken.json``. Raises ``ModelError`` if it is invalid."""

    def __init__(self, path: Path) -> None:
        self._origin = str(path)
        content = read_json_object(path)
        config = content.get("config")
        if not isinstance(config, Mapping):
            raise self._invalid("config is missing")
        self._config = config
        self.version = str(config.get("version"))[:40]
        pattern = config.get("pattern")
        if not isinstance(pattern, str):
            raise self._invalid("config.pattern is missing")
        self._pattern = pattern
        specials = self._number("default_num_special_tokens")
        size = self._number("default_vocab_size")
        if size <= specials:
            raise self._invalid(f"has {size} tokens, of which {specials} are special")
        self.special = self._special(content.get("special_tokens"), specials)
        vocabulary = content.get("vocab")
        if not isinstance(vocabulary, list) or len(vocabulary) < size - specials:
            raise self._invalid(f"vocab must be a list of at least {size - specials} tokens")
        self._tokens = [
            self._token(rank, one) for rank, one in enumerate(vocabulary[: size - specials])
        ]

    def tokenizer_json(self, added_tokens: AddedTokens) -> str:
        """The whole ``tokenizer.json``. Special tokens come first."""
        names = {"bos_token": _BOS, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        added_tokens.default(**{key: text for key, text in names.items() if text in self.special})
        vocabulary, model = ranked_bytes(self._tokens, len(self.special), self._origin)
        for number, text in enumerate(self.special):
            if text in vocabulary:
                raise self._invalid(
                    f"tokens {vocabulary[text]} and {number} are the same, {text[:40]!r}"
                )
            vocabulary[text] = number
            added_tokens.by_number.setdefault(number, entry(text, number))
        tokens = added_tokens.merge_into(vocabulary, self._origin)
        first = ("bos_token",) if added_tokens.flag("add_bos_token", _BOS in self.special) else ()
        return tokenizer_json(
            model,
            added=tokens,
            pre_tokenizer=split_by(self._pattern),
            post_processor=added_tokens.template_processing(first, (), vocabulary, self._origin),
            decoder=byte_level(use_regex=False),
        )

    def _special(self, entries: Any, count: int) -> list[str]:
        if entries is None:
            if self.version not in _OLDER_VERSIONS:
                raise self._invalid(f"special_tokens are missing, which {self.version} needs")
            entries = [
                {"rank": rank, "token_str": text} for rank, text in enumerate(_OLDER[:count])
            ]
        if not isinstance(entries, list):
            raise self._invalid("special_tokens must be a list")
        texts: dict[int, str] = {}
        for one in entries:
            rank: Any = one.get("rank") if isinstance(one, Mapping) else None
            text = one.get("token_str") if isinstance(one, Mapping) else None
            if not _is_number(rank) or not 0 <= rank < count or not isinstance(text, str):
                raise self._invalid(
                    f"a special token must have token_str, and a rank below {count}: "
                    f"{json.dumps(one)[:80]}"
                )
            if rank in texts:
                raise self._invalid(f"two special tokens have the rank {rank}")
            texts[rank] = check_token(text, rank, self._origin)
        tokens = [texts.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
        if len(set(tokens)) != count:
            raise self._invalid("two special tokens are the same")
        return tokens

    def _token(self, rank: int, one: Any) -> bytes:
        text = one.get("token_bytes") if isinstance(one, Mapping) else None
        if not isinstance(text, str):
            raise self._invalid(f"token {rank} of vocab has no token_bytes")
        if one.get("rank", rank) != rank:
            raise self._invalid(f"token {rank} of vocab has the rank {one['rank']!r:.20}")
        return decode_token(text, rank, self._origin)

    def _number(self, key: str) -> int:
        value: Any = self._config.get(key)
        if not _is_number(value) or not 0 <= value <= MAX_TOKENS:
            raise self._invalid(f"config.{key} is {value!r:.40}; it must be a number of tokens")
        number: int = value
        return number

    def _invalid(self, problem: str) -> ModelError:
        return ModelError(f"{self._origin}: {problem}; download the file again")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
