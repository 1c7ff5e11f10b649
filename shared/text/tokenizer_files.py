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


# What is raised by JSON, or by content, that is not a tokenizer's.
_INVALID = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class TemplateText:
    """The source of a chat template; ``origin`` names it in error messages."""

    source: str
    origin: str


@dataclass(frozen=True)
class TokenizerFiles:
    """``tokenizer`` is the JSON of a ``tokenizer.json``, which ``origin`` names in error messages.
    ``config`` and ``generation_config`` are the contents of ``tokenizer_config.json`` and
    ``generation_config.json``. ``tool_template`` is that of chats with tools, if they have one of
    their own, and ``more_templates`` are used by their names only. ``sentence_config`` is
    the content of ``config_sentence_transformers.json``."""

    tokenizer: str
    origin: str
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    template: TemplateText | None = None
    tool_template: TemplateText | None = None
    more_templates: Mapping[str, TemplateText] = field(default_factory=dict)
    sentence_config: Mapping[str, Any] = field(default_factory=dict)

    def templates(self) -> dict[str, TemplateText]:
        """All chat templates by their names."""
        both = {DEFAULT: self.template, TOOL_USE: self.tool_template}
        return {**self.more_templates, **{name: one for name, one in both.items() if one}}

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
        except _INVALID as error:
            raise self._invalid(error) from None

    def added_tokens(self) -> dict[str, int]:
        """The number of each token that is matched before the model of the tokenizer. Raises
        ``ModelError`` as ``vocabulary`` does."""
        try:
            return _added(json.loads(self.tokenizer))
        except _INVALID as error:
            raise self._invalid(error) from None

    def _invalid(self, error: Exception) -> ModelError:
        known = isinstance(error, KeyError)
        problem = f"it has no {error.args[0]!r}" if known else f"{error!r:.200}"
        return ModelError(f"{self.origin}: not a tokenizer: {problem}; download it again")


def _added(content: Any) -> dict[str, int]:
    return {each["content"]: each["id"] for each in content.get("added_tokens") or ()}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a model folder. Raises ``ModelError`` with the invalid file."""
    config = read_json_object(folder / "tokenizer_config.json")
    templates = _read_templates(folder, config)
    vocabulary = read_vocabulary(folder, config)
    if not templates and vocabulary.template is not None:
        templates = {DEFAULT: TemplateText(vocabulary.template, vocabulary.origin)}
    if (named := template_by_name(name_of(folder))) is not None and not any(
        shows_pairs(template.source) for template in templates.values()
    ):
        templates[RERANK] = TemplateText(named, "the template of Qwen3's rerankers")
    tokenizer = vocabulary.tokenizer
    if read_json_object(sentence_config_file(folder)).get("do_lower_case") is True:
        tokenizer = _lowering(tokenizer, vocabulary.origin)
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


def _lowering(tokenizer: str, origin: str) -> str:
    """A tokenizer's JSON whose text is put in lower case first, as sentence-transformers does."""
    try:
        content = json.loads(tokenizer)
        own = content.get("normalizer")
    except _INVALID as error:
        raise ModelError(f"{origin}: not a tokenizer: {error!r:.200}; download it again") from None
    steps = [{"type": "Lowercase"}, *([own] if own else [])]
    return json.dumps(content | {"normalizer": {"type": "Sequence", "normalizers": steps}})


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, TemplateText]:
    """The templates by their names. Files win over ``tokenizer_config.json``, as in transformers;
    ``chat_template.json``, which there only processors of images read, comes last."""
    files = {DEFAULT: folder / "chat_template.jinja"}
    more = folder / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    found = {
        name: TemplateText(read_text(path), str(path))
        for name, path in files.items()
        if path.is_file()
    }
    if DEFAULT in found:
        return found
    path = folder / "tokenizer_config.json"
    listed = templates_of(config.get("chat_template"), str(path))
    if not found and not listed:
        path = folder / "chat_template.json"
        return templates_of(read_json_object(path).get("chat_template"), str(path))
    # transformers would have no template for a chat without tools.
    return {DEFAULT: listed[DEFAULT], **found} if found and DEFAULT in listed else found or listed


def templates_of(value: Any, origin: str) -> dict[str, TemplateText]:
    """The templates of a ``chat_template``: one, or several with names. Raises ``ModelError``."""
    named = value
    if value is None or isinstance(value, str):
        named = {} if value is None else {DEFAULT: value}
    elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        named = {one.get("name"): one.get("template") for one in value}
    if not isinstance(named, Mapping) or not all(
        isinstance(text, str) for pair in named.items() for text in pair
    ):
        raise ModelError(
            f"{origin}: chat_template must be a string, or a list of objects with 'name' and "
            f"'template'"
        )
    return {name: TemplateText(source, origin) for name, source in named.items()}
