"""Tokens that are matched before a text is split, from the files beside a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..model_files import read_json_object
from ..special_tokens import SPECIAL_NAMES
from .tokenizer_json import MAX_TOKENS, Step, check_token, template_processing

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
ADDITIONAL = "additional_special_tokens"
_NAMES = (*SPECIAL_NAMES, "mask_token")


def entry(content: str, number: int, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    """An added token, as in a ``tokenizer.json``."""
    return {
        "id": number,
        "content": content,
        **dict.fromkeys(_FLAGS, False),
        "special": special,
        **flags,
    }


class AddedTokens:
    """The added tokens of a model folder, and its ``config``: the contents of
    ``tokenizer_config.json``, with the special tokens that only ``special_tokens_map.json``
    names."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        special_map = read_json_object(folder / "special_tokens_map.json")
        keys = (*_NAMES, ADDITIONAL)
        self.config = {**{key: special_map[key] for key in keys if key in special_map}, **config}
        self._place = folder / "tokenizer_config.json"
        self._special: dict[str, dict[str, bool]] = {}
        more = self.config.get(ADDITIONAL)
        for value in [*map(self.config.get, _NAMES), *(more if isinstance(more, list) else [])]:
            self._name(value)
        self.by_number: dict[int, dict[str, Any]] = {}
        decoder = self.config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, Mapping):
            raise ModelError(f"{self._place}: added_tokens_decoder must be an object")
        for number, token in decoder.items():
            if not isinstance(token, Mapping):
                raise self._invalid(number)
            flags = {key: bool(token[key]) for key in _FLAGS if key in token}
            self._add(self._place, number, token.get("content"), bool(token.get("special")), flags)
        older_file = folder / "added_tokens.json"
        for content, number in read_json_object(older_file).items():
            self._add(older_file, number, content, content in self._special, {})

    def default(self, **values: Any) -> None:
        """Set values that the config leaves out; tokens that they name become special."""
        for key, value in values.items():
            if self.config.get(key) is None:
                self.config[key] = value
                if key in _NAMES:
                    self._name(value)

    def token(self, name: str) -> str | None:
        """The text of a special token such as ``bos_token``."""
        value = self.config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        return content if isinstance(content, str) else None

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of the config. Raises ``ModelError`` for anything else."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._place}: {name} is {value!r:.40}; supported: true or false")
        return value

    @property
    def tokenizer_class(self) -> str | None:
        """The class of the tokenizer, without ``Fast``."""
        value = self.config.get("tokenizer_class")
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self._place}: tokenizer_class is {value!r:.40}; must be a string")
        return None if value is None else value.removesuffix("Fast")

    def merge_into(self, vocabulary: dict[str, int], origin: str) -> list[dict[str, Any]]:
        """The added tokens in order, including tokens of ``vocabulary`` that the config only names
        as special.

        Added tokens enter ``vocabulary`` only if the ids have a gap: the library numbers those
        after the vocabulary itself, and a few models have some beyond their embedding. Raises
        ``ModelError`` if the two contradict each other.
        """
        contents = {number: content for content, number in vocabulary.items()}
        for content, flags in self._special.items():
            number = vocabulary.get(content)
            if number is not None and number not in self.by_number:
                self.by_number[number] = entry(content, number, **flags)
        numbers = dict(vocabulary)
        for number, token in self.by_number.items():
            content = token["content"]
            if (other := numbers.setdefault(content, number)) != number:
                raise ModelError(
                    f"{self._place}: {content[:40]!r} is added as token {number}, and is token "
                    f"{other} of {origin}"
                )
            if (other := contents.get(number, content)) != content:
                raise ModelError(
                    f"{self._place}: {content[:40]!r} is added as token {number}, which is "
                    f"{other[:40]!r} in {origin}"
                )
        if len(numbers) != 1 + max(numbers.values(), default=-1):
            vocabulary |= numbers
        return [self.by_number[number] for number in sorted(self.by_number)]

    def template_processing(
        self, first: Sequence[str], last: Sequence[str], vocabulary: Mapping[str, int], origin: str
    ) -> Step | None:
        """The step that puts the special tokens named ``first`` before every text, and those named
        ``last`` after it. Raises ``ModelError`` if the model lacks one."""
        ids = {token["content"]: token["id"] for token in self.by_number.values()} | {**vocabulary}
        texts = {name: self.token(name) for name in (*first, *last)}
        for name, text in texts.items():
            if text is None or text not in ids:
                value = "none" if text is None else repr(text[:40])
                raise ModelError(
                    f"{origin}: texts begin or end with the {name}, but it is {value}, which is "
                    f"not a token"
                )
        return template_processing(
            [text for name in first if (text := texts[name])],
            [text for name in last if (text := texts[name])],
            ids,
        )

    def _name(self, value: Any) -> None:
        if isinstance(value, str):
            self._special.setdefault(value, {})
        elif isinstance(value, Mapping) and isinstance(content := value.get("content"), str):
            flags = {key: bool(value[key]) for key in _FLAGS if key in value}
            self._special.setdefault(content, flags)

    def _add(
        self, path: Path, key: Any, content: Any, special: bool, flags: dict[str, bool]
    ) -> None:
        number = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 9 else key
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(content, str):
            raise self._invalid(key, path)
        if not 0 <= number < MAX_TOKENS:
            raise ModelError(f"{path}: {number} is not a token id")
        check_token(content, number, str(path))
        existing = self.by_number.get(number)
        if existing is not None and existing["content"] != content:
            raise ModelError(
                f"{path}: token {number} is {content[:40]!r}, and {existing['content'][:40]!r} too"
            )
        if existing is None:
            self.by_number[number] = entry(content, number, special=special, **flags)

    def _invalid(self, key: Any, path: Path | None = None) -> ModelError:
        return ModelError(
            f"{path or self._place}: the added token {key!r:.40} must have a number and a text"
        )
