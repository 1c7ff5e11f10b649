"""Detection of a model's formats of tool calls and reasoning, by its chat template, which renders
earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .reasoning import NO_PARSER

AUTO = "auto"
Signs = Sequence[tuple[tuple[str, ...], str]]

# The first line whose texts are all in the template decides the format.
TOOL_SIGNS: Signs = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_xml"),
    (("[TOOL_CALLS]",), "mistral"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("Environment: ipython",), "llama3_json"),
    (("<|tool_call|>",), "granite"),
    (("<|start_of_role|>", "<tool_call>"), "granite4"),
    (("<function_call>",), "granite-20b-fc"),
    (("<tool_call>",), "hermes"),
)
OTHER_TOOLS = "json"
REASONING_SIGNS: Signs = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("Here is my thought process",), "granite"),
    (("<arg_key>", "<think>"), "glm45"),
    (("<|tool_calls_section_begin|>", "<think>"), "kimi_k2"),
    (("<｜Assistant｜>", "think>"), "deepseek_r1"),
    (("<think>",), "qwen3"),
)


def tool_parser(name: str, template: str) -> str:
    """The parser ``name``, or that of the model's template if it is ``auto``."""
    return _first(TOOL_SIGNS, OTHER_TOOLS, template) if name == AUTO else name


def reasoning_name(name: str, template: str) -> str:
    """The reasoning parser ``name``, or that of the model's template if it is ``auto``."""
    return _first(REASONING_SIGNS, NO_PARSER, template) if name == AUTO else name


@lru_cache(maxsize=16)
def _first(signs: Signs, otherwise: str, template: str) -> str:
    names = (name for texts, name in signs if all(text in template for text in texts))
    return next(names, otherwise)
