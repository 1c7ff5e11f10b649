"""A router's defaults for requests: sampling parameters, chat template and its variables."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .fields import check_option, json_object, option
from .sampling_fields import MAX_INT, NUMBERS, Number, with_number_options

# vLLM's values for the model's own generation_config.json, and for none.
MODELS_OWN, NONE = "auto", "vllm"
# The limit of every request, which vLLM has among the defaults.
LIMIT = "max_new_tokens"
_TOKENS = Number(
    default=0, minimum=1, maximum=MAX_INT, above=False, computable=(1, MAX_INT), help=""
)
DEFAULTS = NUMBERS | {LIMIT: _TOKENS}
# The name of one of a model's chat templates.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Variables of chat templates that only the router sets.
RESERVED_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt", "chat_template"))


@dataclass(frozen=True, kw_only=True)
@with_number_options("Default of {name}. {help}")
class SamplingConfig:
    """Defaults of sampling parameters. A request's own values take precedence."""

    generation_config: str = option(
        MODELS_OWN,
        "--generation-config",
        "Source of the sampling defaults. auto: the model's generation_config.json, or a GGUF "
        "file's metadata, or else llama.cpp's defaults; vllm: OpenAI's defaults; otherwise such a "
        "file, or a folder with one.",
    )
    override_generation_config: str | None = option(
        None,
        "--override-generation-config",
        "JSON object with sampling defaults that replace those of --generation-config, such as "
        "'{\"temperature\": 0.5}'; max_new_tokens limits every request, as in vLLM.",
    )
    max_tokens: int | None = option(
        None,
        "--max-tokens",
        "Default of max_tokens in requests (default: what fits in the context; 16 for text "
        "completions, as in OpenAI's API).",
        minimum=1,
        maximum=MAX_INT,
    )
    chat_template: str | None = option(
        None,
        "--chat-template",
        "Chat template instead of the model's default: a file, the template itself, or the name of "
        "one of the model's templates.",
    )
    default_chat_template_kwargs: str | None = option(
        None,
        "--default-chat-template-kwargs",
        "JSON object with default variables of the chat template, such as "
        "'{\"enable_thinking\": false}'.",
    )

    def _check_sampling(self) -> None:
        """Raise ``UsageError`` for a value that is invalid in requests."""
        for item in fields(SamplingConfig):
            check_option(item.metadata, getattr(self, item.name))
        check_defaults("--override-generation-config", self.overrides)
        for name, number in NUMBERS.items():
            if number.above and getattr(self, name) == number.minimum:
                raise UsageError(f"--{name.replace('_', '-')} 0 is out of range: must be above 0")
        _ = self.template_source
        for name in self.template_variables:
            if name in RESERVED_VARIABLES or name.startswith("_"):
                raise UsageError(f"--default-chat-template-kwargs must not set {name!r}")

    @property
    def overrides(self) -> dict[str, Any]:
        """The object of ``--override-generation-config``. Raises ``UsageError``."""
        return json_object("--override-generation-config", self.override_generation_config)

    @property
    def template_source(self) -> str | None:
        """The template of ``--chat-template``, unless it is a name. Raises ``UsageError``."""
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        if self.template_name is not None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--chat-template {self.chat_template}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"--chat-template {self.chat_template} is not UTF-8") from None

    @property
    def template_name(self) -> str | None:
        """The name in ``--chat-template``, if it is not a template or a file."""
        name = self.chat_template
        if name is None or not _NAME.fullmatch(name) or Path(name).exists():
            return None
        return name

    @property
    def template_variables(self) -> dict[str, Any]:
        """The object of ``--default-chat-template-kwargs``. Raises ``UsageError``."""
        return json_object("--default-chat-template-kwargs", self.default_chat_template_kwargs)


def check_defaults(flag: str, values: dict[str, Any]) -> None:
    """Raise ``UsageError`` for anything but sampling parameters in their ranges."""
    for name, value in values.items():
        if name not in DEFAULTS:
            names = ", ".join(DEFAULTS)
            raise UsageError(f"{flag}: {name!r} is not a default that can be set; use {names}")
        number = DEFAULTS[name]
        low, high, above, whole = number.minimum, number.maximum, number.above, number.kind is int
        valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not valid or not low <= value <= high or (above and value == low):
            kind = "an integer" if whole else "a number"
            between = f"above {low:g} and at most" if above else f"from {low:g} to"
            raise UsageError(f"{flag}: {name} {value!r} must be {kind} {between} {high:g}")
