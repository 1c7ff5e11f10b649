"""The contents of a tokenizer's files, in a model folder or from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError


@dataclass(frozen=True)
class TokenizerFiles:
    """``tokenizer`` is the JSON of a ``tokenizer.json``, ``config`` and ``generation_config`` are
    the contents of ``tokenizer_config.json`` and ``generation_config.json``. The origins name both
    in error messages."""

    tokenizer: str
    origin: str
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    template_origin: str = ""

    def vocabulary(self) -> dict[str, int]:
        """The number of each token. Reads the JSON only, which is cheaper than loading a tokenizer.

        Raises ``ModelError`` if it is not that of a tokenizer.
        """
        try:
            content = json.loads(self.tokenizer)
            listed = content["model"]["vocab"]
            if isinstance(listed, list):  # Unigram: pairs of token and score
                listed = {token: number for number, (token, _) in enumerate(listed)}
            return {**listed, **_added(content)}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{self.origin}: not a tokenizer: {error!r}") from None

    def added_tokens(self) -> dict[str, int]:
        """The number of each token that is matched before the model of the tokenizer. Raises
        ``ModelError`` as ``vocabulary`` does."""
        try:
            return _added(json.loads(self.tokenizer))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{self.origin}: not a tokenizer: {error!r}") from None


def _added(content: Any) -> dict[str, int]:
    return {each["content"]: each["id"] for each in content.get("added_tokens") or ()}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a model folder. Raises ``ModelError`` with the invalid file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; a model folder needs a tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    template, origin = _read_template(folder, config)
    return TokenizerFiles(
        _read_text(path),
        str(path),
        config,
        _read_json(folder / "generation_config.json"),
        template,
        origin,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8: {error}") from error


def _read_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    source: Any = None
    if path.is_file():
        source = _read_text(path)
    else:
        path = folder / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, Mapping)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{path}: chat_template must be a string")
    return source, str(path)
