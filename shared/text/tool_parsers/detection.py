"""The format in which a model writes calls, by its chat template, which shows earlier ones."""

from __future__ import annotations

from functools import lru_cache

AUTO = "auto"
# By what a template contains; the first that it does counts.
SIGNS = (("<tool_call>", "hermes"),)
OTHERWISE = "hermes"


def tool_parser(name: str, template: str) -> str:
    """The parser ``name``, or that of the model's template if it is ``auto``."""
    return _detected(template) if name == AUTO else name


@lru_cache(maxsize=8)
def _detected(template: str) -> str:
    return next((name for sign, name in SIGNS if sign in template), OTHERWISE)
