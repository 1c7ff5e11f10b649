"""The table of tool parsers, by their names in vLLM's ``--tool-call-parser``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    deepseek,
    glm45,
    harmony,
    hermes,
    json_list,
    kimi_k2,
    mistral,
    pythonic,
    qwen3_xml,
)
from .gemma import FUNCTION_GEMMA, GEMMA4, GemmaMarkers, gemma
from .json_list import calls_after
from .reader import Reader, Steps
from .tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format in which models write calls. ``markers`` must reach the parser as text where they
    are special tokens. A call may begin with one of ``starts``, which also ends the reasoning."""

    parse: Callable[[Reader, ToolUse], Steps]
    markers: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()


_HERMES = ToolFormat(hermes.hermes, hermes.MARKERS, (hermes.START,))
_QWEN_XML = ToolFormat(
    qwen3_xml.qwen3_xml, qwen3_xml.MARKERS, (qwen3_xml.START, qwen3_xml.FUNCTION)
)
_GLM = ToolFormat(glm45.glm45, glm45.MARKERS, (glm45.START,))
_LLAMA = ToolFormat(json_list.llama3_json, (json_list.PYTHON_TAG,), (json_list.PYTHON_TAG,))
_PYTHONIC = ToolFormat(pythonic.pythonic, pythonic.MARKERS, (pythonic.START,))
_DEEPSEEK = deepseek.START, deepseek.CALL


def _gemma(markers: GemmaMarkers) -> ToolFormat:
    return ToolFormat(gemma(markers), markers.all, (markers.start,))


def _granite(*starts: str, end: str = "") -> ToolFormat:
    markers = (*starts, end) if end else starts
    return ToolFormat(calls_after(*starts, end=end), markers, starts)


FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": ToolFormat(deepseek.deepseek_v3, deepseek.MARKERS, _DEEPSEEK),
    "deepseek_v31": ToolFormat(deepseek.deepseek_v31, deepseek.MARKERS, _DEEPSEEK),
    "functiongemma": _gemma(FUNCTION_GEMMA),
    "gemma4": _gemma(GEMMA4),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": _granite(*json_list.GRANITE, end=json_list.GRANITE_END),
    "granite4": _HERMES,
    "granite-20b-fc": _granite(json_list.GRANITE_20B),
    "hermes": _HERMES,
    "json": ToolFormat(json_list.bare_json),
    "kimi_k2": ToolFormat(kimi_k2.kimi_k2, kimi_k2.MARKERS, (kimi_k2.START, kimi_k2.CALL)),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "mistral": ToolFormat(mistral.mistral, mistral.MARKERS, (mistral.START,)),
    "openai": ToolFormat(harmony.harmony, harmony.MARKERS),
    "phi4_mini_json": ToolFormat(json_list.phi4),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
}

_NAMED = ToolFormat(json_list.named_call)
_REQUIRED = ToolFormat(json_list.required_calls)


def format_of(tools: ToolUse) -> ToolFormat:
    """The format of a request's calls: the model's own, unless a grammar constrains it."""
    if tools.named:
        return _NAMED
    return _REQUIRED if tools.required else FORMATS[tools.parser]
