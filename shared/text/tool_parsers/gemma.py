"""``call:f{key:<escape>text<escape>,other:1}`` between markers: FunctionGemma and Gemma 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .json_call import stream_arguments, verbatim_text
from .reader import NotACallError, Reader, Steps
from .tool_use import ToolUse, is_name

MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class GemmaMarkers:
    """The markers of one generation of models; ``quote`` encloses strings."""

    start: str
    end: str
    quote: str

    @property
    def all(self) -> tuple[str, ...]:
        return self.start, self.end, self.quote


FUNCTION_GEMMA = GemmaMarkers("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaMarkers("<|tool_call>", "<tool_call|>", '<|"|>')


def gemma(markers: GemmaMarkers) -> Callable[[Reader, ToolUse], Steps]:
    """The parser for models with these markers."""

    def parse(reader: Reader, tools: ToolUse) -> Steps:
        def call(_: list[str]) -> Steps:
            yield from _call(reader, tools, markers)

        yield from reader.marked_calls(call, (markers.start,), (markers.end, markers.quote))

    return parse


def text_opening(markers: GemmaMarkers, argument: str) -> str:
    """The text before the value of an argument."""
    return f"{argument}:{markers.quote}"


def _call(reader: Reader, tools: ToolUse, markers: GemmaMarkers) -> Steps:
    """A call, whose arguments are an object with unquoted keys and words."""
    yield from reader.expect("call:")
    name, marker = yield from reader.capture_to(
        "{", markers.start, markers.end, max_length=MAX_NAME
    )
    name = name.strip()
    if marker != "{" or not is_name(name):
        reader.give_back(marker)
        raise NotACallError
    reader.begin_call(name)
    argument = tools.verbatim.get(name, "")
    if argument and (yield from reader.accept(text_opening(markers, argument))):
        yield from verbatim_text(reader, argument)
        return
    reader.give_back(marker)
    ends = (markers.end, markers.start)
    if (yield from stream_arguments(reader, *ends, quote=markers.quote)):
        yield from reader.skip("}")
        yield from reader.accept(markers.end)
