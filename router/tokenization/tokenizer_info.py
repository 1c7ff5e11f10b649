"""GET /tokenizer_info: the tokenizer's configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ...shared.text.tokenizer import Tokenizer

# File names, which are of no use to clients.
HIDDEN = frozenset({"vocab_file", "merges_file", "name_or_path"})


class TokenizerInfo(BaseModel):
    """The contents of tokenizer_config.json, with special tokens as texts."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None = None


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    """The response for a tokenizer."""
    config = {name: value for name, value in tokenizer.config.items() if name not in HIDDEN}
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"} | _plain(config)
    info["chat_template"] = None if tokenizer.template is None else tokenizer.template.source
    return info


def _plain(value: Any) -> Any:
    """The value, with each object that describes a token replaced by the token's text."""
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
