"""Thinking, effort and context management: the fields about reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import INT32, WHOLE, BodyModel, DocumentedAs
from ..requests.context import count_tokens
from ..served_model import ServedModel
from .output_format import OutputFormat

MAX_EDITS = 16
CLEAR_THINKING = "clear_thinking_20251015"
# Chat templates have three efforts.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}

Display = Literal["summarized", "omitted"]


class Thinking(BodyModel):
    """The reasoning of a request. ``adaptive`` and ``between_tools`` leave it to the model when to
    reason, as every model here does."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    display: Display = "summarized"

    @property
    def enabled(self) -> bool:
        return self.type != "disabled"


class OutputConfig(BodyModel):
    """The effort and the format of the output."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": ()}

    format: Annotated[dict[str, Any], DocumentedAs(OutputFormat)] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ThinkingTurns(BodyModel):
    """Keep the reasoning of the last turns."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE]


class AllTurns(BodyModel):
    """Keep all reasoning."""

    type: Literal["all"]


class ContextEdit(BodyModel):
    """Removes the reasoning of earlier turns from the prompt."""

    type: Annotated[str, DocumentedAs(Literal[CLEAR_THINKING])]
    keep: Annotated[Any, DocumentedAs(Literal["all"] | ThinkingTurns | AllTurns)] = None


class ContextManagement(BodyModel):
    """Edits of the conversation before the prompt is rendered."""

    edits: Annotated[list[Any], Field(max_length=MAX_EDITS), DocumentedAs(list[ContextEdit])] = (
        Field(default_factory=list)
    )


def check_thinking(thinking: Thinking, max_tokens: int | None) -> None:
    """Raise ``RequestError`` for a budget that contradicts the rest of the request."""
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and budget is None:
        message = "Missing required parameter: 'thinking.budget_tokens'."
        raise invalid(message, "thinking.budget_tokens", "missing_required_parameter")
    if thinking.type != "enabled" and budget is not None:
        message = f"'thinking.budget_tokens' has no place in thinking of type '{thinking.type}'."
        raise invalid(message, "thinking.budget_tokens")
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        raise invalid(
            f"'max_tokens' ({max_tokens}) must be greater than 'thinking.budget_tokens' "
            f"({budget}).",
            "thinking.budget_tokens",
        )


def template_variables(thinking: Thinking, config: OutputConfig) -> dict[str, Any]:
    """The variables that turn reasoning on and off in templates; each model family has its own."""
    variables: dict[str, Any] = {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
    if config.effort is not None:
        variables["reasoning_effort"] = EFFORTS[config.effort]
    return variables


def turns_to_keep(management: ContextManagement, ignored: set[str]) -> int | None:
    """The number of last turns that keep their reasoning; ``None`` if all do."""
    limits = (
        _turns(edit, f"context_management.edits.{i}", ignored)
        for i, edit in enumerate(management.edits)
    )
    return min((limit for limit in limits if limit is not None), default=None)


def _turns(item: Any, param: str, ignored: set[str]) -> int | None:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    edit = ContextEdit.read(item, ignored, "context_management.edits[].", at=param)
    if edit.type != CLEAR_THINKING:
        raise invalid(
            f"'{param}.type': '{edit.type[:64]}' is not supported by this server; it has "
            f"'{CLEAR_THINKING}' only.",
            f"{param}.type",
            "unsupported_parameter",
        )
    if edit.keep == "all":
        return None
    if edit.keep is None:
        return 1
    if isinstance(edit.keep, dict) and edit.keep.get("type") == "all":
        return None
    return ThinkingTurns.read(edit.keep, ignored, at=f"{param}.keep").value


def clear_thinking(
    turns: list[dict[str, Any]], keep: int | None, model: ServedModel
) -> list[dict[str, Any]]:
    """Remove the reasoning of all turns but the last ``keep`` that have any. Returns the applied
    edits in the response's form."""
    reasoned = [turn for turn in turns if "reasoning_content" in turn]
    if keep is None or len(reasoned) <= keep:
        return []
    texts = [turn.pop("reasoning_content") for turn in reasoned[: len(reasoned) - keep]]
    tokens = count_tokens("\n".join(texts), model)
    counts = {"cleared_thinking_turns": len(texts), "cleared_input_tokens": tokens}
    return [{"type": CLEAR_THINKING, **counts}]
