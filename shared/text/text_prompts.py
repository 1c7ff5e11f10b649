"""Prompts that a model for embeddings was trained with, as sentence-transformers keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError, RequestError

_FILE = "config_sentence_transformers.json"
# The names that a query's prompt and a document's may have, in order of preference.
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True)
class TextPrompts:
    """``named`` are put before a text; ``default`` is that of a text without a name of one."""

    named: Mapping[str, str] = field(default_factory=dict)
    default: str = ""

    def of(self, name: str | None) -> str:
        """The prompt of a name, or the default. Raises ``RequestError`` for an unknown name."""
        if name is None:
            return self.default
        if name not in self.named:
            known = ", ".join(map(repr, self.named)) or "none"
            raise RequestError(
                f"Invalid value for 'prompt_name': {name[:64]!r}; this model has: {known}.",
                param="prompt_name",
            )
        return self.named[name]

    def first_of(self, names: tuple[str, ...]) -> str:
        """The prompt of the first of these names that the model has, or the default."""
        return next((self.named[name] for name in names if name in self.named), self.default)


NO_PROMPTS = TextPrompts()


def read_prompts(config: Mapping[str, Any]) -> TextPrompts:
    """The prompts of a ``config_sentence_transformers.json``. Raises ``ModelError``."""
    named, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(named, Mapping) or not all(isinstance(each, str) for each in named.values()):
        raise ModelError(f"{_FILE}: prompts must be an object of texts")
    if default is not None and default not in named:
        raise ModelError(f"{_FILE}: default_prompt_name is {default!r}, which prompts has not")
    return TextPrompts(dict(named), "" if default is None else named[default])
