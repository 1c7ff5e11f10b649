"""How the reasoning of a model is found, by the router's option and the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.text.detection import reasoning_name
from ...shared.text.reasoning import opened_by
from ..generation import TextOptions
from ..options import RouterOptions
from ..served_model import ServedModel

# Tokens at the end of a prompt, among which a template's markers of the reasoning are.
LAST_TOKENS = 24


def reasoning_of(model: ServedModel, options: RouterOptions) -> str:
    """The name of the parser of this model's reasoning."""
    template = model.tokenizer.template
    return reasoning_name(options.reasoning_parser, "" if template is None else template.source)


def prompt_opens_reasoning(
    text: TextOptions, prompt: Sequence[int], model: ServedModel
) -> bool | None:
    """Whether the output begins inside the reasoning, as far as the end of the prompt says it."""
    end = model.tokenizer.decode(prompt[-LAST_TOKENS:], skip_special_tokens=False)
    return opened_by(text.reasoning_parser, end)
