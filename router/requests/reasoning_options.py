"""How to find a model's reasoning in its output, by the router's option and the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ...proto import tandem_pb2 as pb
from ...shared.text.detection import reasoning_name
from ...shared.text.output_parser import call_markers
from ...shared.text.reasoning import NO_PARSER, opened_by, section_markers
from ...shared.text.tool_parsers.tool_use import ToolUse
from ..options import RouterOptions
from ..served_model import ServedModel

# Tokens at the end of a prompt to search for a template's markers of the reasoning.
LAST_TOKENS = 24


def reasoning_of(model: ServedModel, options: RouterOptions) -> str:
    """The name of the reasoning parser for this model."""
    template = model.tokenizer.template
    return reasoning_name(options.reasoning_parser, "" if template is None else template.source)


def prompt_opens_reasoning(parser: str, prompt: Sequence[int], model: ServedModel) -> bool | None:
    """True if the prompt opens the reasoning, so that the output begins inside of it, false if the
    prompt closes it, otherwise ``None``."""
    if parser == NO_PARSER:
        return None
    end = model.tokenizer.decode(prompt[-LAST_TOKENS:], skip_special_tokens=False)
    return opened_by(parser, end)


def limit_thinking(
    sampling: pb.Sampling,
    tokens: int | None,
    parser: str,
    opened: bool | None,
    tools: ToolUse | None,
    model: ServedModel,
    *,
    param: str,
) -> None:
    """Limit the reasoning to ``tokens``, after which nodes end it; ``None`` is unlimited. No-op for
    models without reasoning."""
    markers = section_markers(parser, opened=opened)
    if tokens is None or markers is None:
        return
    start = "" if markers.opened else markers.start
    calls = call_markers(tools, model.tokenizer.texts).texts
    budget = pb.ThinkingBudget(
        tokens=tokens, start=start, end=markers.end, calls=calls, param=param
    )
    sampling.thinking.CopyFrom(budget)
