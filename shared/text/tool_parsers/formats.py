"""The table of tool parsers, by the names that vLLM's ``--tool-call-parser`` has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    deepseek_calls,
    glm45,
    harmony,
    hermes,
    json_list,
    kimi_k2,
    mistral_calls,
    pythonic,
    qwen3_xml,
)
from .gemma import FUNCTION_GEMMA, GEMMA4, GemmaMarkers, gemma
from .json_list import calls_after
from .reader import Reader, Steps
from .tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format in which models write calls. ``kept`` are its markers: where they are special
    tokens, they must reach the parser as text. Those of them with which a call may begin,
    ``starts``, end a reasoning too."""

    parse: Callable[[Reader, ToolUse], Steps]
    kept: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()


_HERMES = ToolFormat(hermes.hermes, hermes.MARKERS, (hermes.START,))
_QWEN_XML = ToolFormat(
    qwen3_xml.qwen3_xml, qwen3_xml.MARKERS, (qwen3_xml.START, qwen3_xml.FUNCTION)
)
_GLM = ToolFormat(glm45.glm45, glm45.MARKERS, (glm45.START,))
_LLAMA = ToolFormat(json_list.llama3_json, (json_list.PYTHON_TAG,), (json_list.PYTHON_TAG,))
_PYTHONIC = ToolFormat(pythonic.pythonic, pythonic.MARKERS, (pythonic.START,))
_DEEPSEEK = deepseek_calls.START, deepseek_calls.CALL


def _gemma(markers: GemmaMarkers) -> ToolFormat:
    return ToolFormat(gemma(markers), markers.all, (markers.start,))


def _granite(*starts: str, end: str = "") -> ToolFormat:
    kept = (*starts, end) if end else starts
    return ToolFormat(calls_after(*starts, end=end), kept, starts)


FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": ToolFormat(deepseek_calls.deepseek_v3, deepseek_calls.MARKERS, _DEEPSEEK),
    "deepseek_v31": ToolFormat(deepseek_calls.deepseek_v31, deepseek_calls.MARKERS, _DEEPSEEK),
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
    "mistral": ToolFormat(mistral_calls.mistral, mistral_calls.MARKERS, (mistral_calls.START,)),
    "openai": ToolFormat(harmony.harmony, harmony.MARKERS),
    "phi4_mini_json": ToolFormat(json_list.phi4),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
}

_NAMED = ToolFormat(json_list.named_call)
_REQUIRED = ToolFormat(json_list.required_calls)


def format_of(tools: ToolUse) -> ToolFormat:
    """The format of a request's calls: the model's own, unless a grammar sets it."""
    if tools.named:
        return _NAMED
    return _REQUIRED if tools.required else FORMATS[tools.parser]
