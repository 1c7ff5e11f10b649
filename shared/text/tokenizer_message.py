"""The contents of a tokenizer's files as bytes, for routers without the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ..errors import ModelError
from .tokenizer_files import TemplateText, TokenizerFiles

# Several times the size of the largest published tokenizers.
MAX_BYTES = 256 << 20
_TEXTS = ("tokenizer", "origin")
_OBJECTS = ("config", "generation_config", "sentence_config")


def pack_tokenizer(files: TokenizerFiles) -> bytes:
    """The contents of the files as bytes."""
    return json.dumps(asdict(files), ensure_ascii=False).encode(errors="surrogatepass")


def unpack_tokenizer(data: bytes) -> TokenizerFiles:
    """The contents that ``pack_tokenizer`` packed. Raises ``ModelError`` for any other bytes."""
    try:
        values = json.loads(data.decode(errors="surrogatepass"))
        texts = [values[name] for name in _TEXTS]
        objects = [values.get(name, {}) for name in _OBJECTS]
        templates = {
            name: _templates(value) for name, value in values.items() if "template" in name
        }
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is not a string")
        if not all(isinstance(each, Mapping) for each in objects):
            raise TypeError("an object is not a mapping")
        names = {item.name for item in fields(TokenizerFiles)}
        return TokenizerFiles(**{k: v for k, v in {**values, **templates}.items() if k in names})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"it is not a tokenizer: {error!r:.200}") from None


def _templates(value: Any) -> TemplateText | dict[str, TemplateText] | None:
    """One template, several by name, or ``None``."""
    if value is None:
        return None
    if "source" in value:
        return _template(value)
    return {name: _template(each) for name, each in value.items()}


def _template(value: Any) -> TemplateText:
    source, origin = value["source"], value["origin"]
    if not isinstance(source, str) or not isinstance(origin, str):
        raise TypeError("a template is not a string")
    return TemplateText(source, origin)
