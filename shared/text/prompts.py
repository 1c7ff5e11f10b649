"""Prompts that an embedding model was trained with, in the form of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError, RequestError

_FILE = "config_sentence_transformers.json"
# Names for the prompts of queries and of documents, in order of preference.
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True)
class TextPrompts:
    """Prompts to put before a text, by name, and the ``default`` for a text without a name."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""

    def of(self, name: str | None) -> str:
        """The prompt with a name, or the default. Raises ``RequestError`` for an unknown name."""
        if name is None:
            return self.default
        if name not in self.by_name:
            names = ", ".join(map(repr, self.by_name)) or "none"
            raise RequestError(
                f"Invalid value for 'prompt_name': {name[:64]!r}; this model has: {names}.",
                param="prompt_name",
            )
        return self.by_name[name]

    def first_of(self, names: tuple[str, ...]) -> str:
        """The prompt of the first of these names that the model has, or the default."""
        return next((self.by_name[name] for name in names if name in self.by_name), self.default)


NO_PROMPTS = TextPrompts()


def read_prompts(config: Mapping[str, Any]) -> TextPrompts:
    """The prompts of a ``config_sentence_transformers.json``. Raises ``ModelError``."""
    by_name, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(by_name, Mapping) or not all(
        isinstance(each, str) for each in by_name.values()
    ):
        raise ModelError(f"{_FILE}: prompts must be an object of texts")
    if default is not None and default not in by_name:
        raise ModelError(f"{_FILE}: default_prompt_name is {default!r}, which is not in prompts")
    return TextPrompts(dict(by_name), "" if default is None else by_name[default])
