"""The contents of a tokenizer's files, in a model folder or from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .model_files import read_json_object, read_text, sentence_config_file
from .pair_template import RERANK, name_of, shows_pairs, template_by_name
from .vocabulary.files import read_vocabulary

DEFAULT, TOOL_USE = "default", "tool_use"


# Raised when reading content that is not a tokenizer's.
_INVALID = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class TemplateText:
    """The source of a chat template; ``origin`` names it in error messages."""

    source: str
    origin: str


@dataclass(frozen=True)
class TokenizerFiles:
    """``tokenizer`` is the content of a ``tokenizer.json``; ``origin`` names it in error messages.
    ``config`` and ``generation_config`` are the contents of ``tokenizer_config.json`` and
    ``generation_config.json``, ``sentence_config`` of ``config_sentence_transformers.json``.
    ``tool_template`` is for chats with tools, if they have a template of their own, and
    ``more_templates`` are used by name only."""

    tokenizer: str
    origin: str
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    template: TemplateText | None = None
    tool_template: TemplateText | None = None
    more_templates: Mapping[str, TemplateText] = field(default_factory=dict)
    sentence_config: Mapping[str, Any] = field(default_factory=dict)

    def templates(self) -> dict[str, TemplateText]:
        """All chat templates by name."""
        both = {DEFAULT: self.template, TOOL_USE: self.tool_template}
        return {**self.more_templates, **{name: one for name, one in both.items() if one}}

    def vocabulary(self) -> dict[str, int]:
        """The id of each token. Reads the JSON only, which is cheaper than loading a tokenizer.

        Raises ``ModelError`` if the JSON is not a tokenizer's.
        """
        try:
            content = json.loads(self.tokenizer)
            tokens = content["model"]["vocab"]
            if isinstance(tokens, list):  # Unigram: pairs of token and score
                tokens = {token: number for number, (token, _) in enumerate(tokens)}
            return {**tokens, **_added_tokens(content)}
        except _INVALID as error:
            raise self._invalid(error) from None

    def added_tokens(self) -> dict[str, int]:
        """The id of each token that is matched before the tokenizer's model. Raises ``ModelError``
        like ``vocabulary``."""
        try:
            return _added_tokens(json.loads(self.tokenizer))
        except _INVALID as error:
            raise self._invalid(error) from None

    def _invalid(self, error: Exception) -> ModelError:
        is_missing = isinstance(error, KeyError)
        problem = f"it has no {error.args[0]!r}" if is_missing else f"{error!r:.200}"
        return ModelError(f"{self.origin}: not a tokenizer: {problem}; download it again")


def _added_tokens(content: Any) -> dict[str, int]:
    return {each["content"]: each["id"] for each in content.get("added_tokens") or ()}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a model folder. Raises ``ModelError``, which names the invalid file."""
    config = read_json_object(folder / "tokenizer_config.json")
    templates = _read_templates(folder, config)
    vocabulary = read_vocabulary(folder, config)
    if not templates and vocabulary.template is not None:
        templates = {DEFAULT: TemplateText(vocabulary.template, vocabulary.origin)}
    if (source := template_by_name(name_of(folder))) is not None and not any(
        shows_pairs(template.source) for template in templates.values()
    ):
        templates[RERANK] = TemplateText(source, "the template of Qwen3's rerankers")
    tokenizer = vocabulary.tokenizer
    if read_json_object(sentence_config_file(folder)).get("do_lower_case") is True:
        tokenizer = _lowercase(tokenizer, vocabulary.origin)
    return TokenizerFiles(
        tokenizer,
        vocabulary.origin,
        vocabulary.config,
        read_json_object(folder / "generation_config.json"),
        templates.pop(DEFAULT, None),
        templates.pop(TOOL_USE, None),
        templates,
        read_json_object(folder / "config_sentence_transformers.json"),
    )


def _lowercase(tokenizer: str, origin: str) -> str:
    """A tokenizer's JSON with a step that lowercases text first, as in sentence-transformers."""
    try:
        content = json.loads(tokenizer)
        normalizer = content.get("normalizer")
    except _INVALID as error:
        raise ModelError(f"{origin}: not a tokenizer: {error!r:.200}; download it again") from None
    steps = [{"type": "Lowercase"}, *([normalizer] if normalizer else [])]
    return json.dumps(content | {"normalizer": {"type": "Sequence", "normalizers": steps}})


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, TemplateText]:
    """The templates by name. Files take precedence over ``tokenizer_config.json``, as in
    transformers; ``chat_template.json``, which only image processors read there, comes last."""
    files = {DEFAULT: folder / "chat_template.jinja"}
    more = folder / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    from_files = {
        name: TemplateText(read_text(path), str(path))
        for name, path in files.items()
        if path.is_file()
    }
    if DEFAULT in from_files:
        return from_files
    path = folder / "tokenizer_config.json"
    from_config = templates_of(config.get("chat_template"), str(path))
    if not from_files and not from_config:
        path = folder / "chat_template.json"
        return templates_of(read_json_object(path).get("chat_template"), str(path))
    # transformers would have no template for a chat without tools.
    return (
        {DEFAULT: from_config[DEFAULT], **from_files}
        if from_files and DEFAULT in from_config
        else from_files or from_config
    )


def templates_of(value: Any, origin: str) -> dict[str, TemplateText]:
    """The templates of a ``chat_template``: one, or several by name. Raises ``ModelError``."""
    by_name = value
    if value is None or isinstance(value, str):
        by_name = {} if value is None else {DEFAULT: value}
    elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        by_name = {one.get("name"): one.get("template") for one in value}
    if not isinstance(by_name, Mapping) or not all(
        isinstance(text, str) for pair in by_name.items() for text in pair
    ):
        raise ModelError(
            f"{origin}: chat_template must be a string, or a list of objects with 'name' and "
            f"'template'"
        )
    return {name: TemplateText(source, origin) for name, source in by_name.items()}
