"""The prompt of a conversation, and Anthropic's errors for one that is too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ..errors import invalid
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.context import (
    ContextError,
    TemplateVariables,
    check_template_variables,
    encode_chat,
)
from ..served_model import ServedModel
from .conversation import Messages, TextOrBlocks, Turn, read_conversation
from .output_format import OutputFormat, read_format
from .thinking import (
    ContextManagement,
    OutputConfig,
    Thinking,
    check_thinking,
    clear_thinking,
    template_variables,
    turns_to_keep,
)
from .tool_definitions import Choice, Definitions, ToolUseChoice, read_choice, read_definitions


class PromptBody(BodyModel):
    """The fields of a request that determine its prompt. ``chat_template_kwargs`` is vLLM's."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "compaction": (),
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
    }

    model: Annotated[str, Field(max_length=1024)]
    messages: Messages
    system: TextOrBlocks = None
    tools: Definitions = Field(default_factory=list)
    tool_choice: Choice = Field(default_factory=dict)
    thinking: Annotated[dict[str, Any], DocumentedAs(Thinking)] = Field(default_factory=dict)
    output_config: Annotated[dict[str, Any], DocumentedAs(OutputConfig)] = Field(
        default_factory=dict
    )
    # The older name of the format in ``output_config``.
    output_format: Annotated[dict[str, Any], DocumentedAs(OutputFormat)] | None = None
    context_management: Annotated[dict[str, Any], DocumentedAs(ContextManagement)] = Field(
        default_factory=dict
    )
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    # Accepted without effect: prefixes are always cached, and the others are for Anthropic's own
    # accounting and choice of machines.
    cache_control: Any = None
    speed: Any = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePrompt:
    """The turns, tools and template variables of a request. With ``prefilled``, the output
    continues the last turn. ``format`` constrains its text, and ``applied_edits`` lists for the
    response what was left out of the prompt."""

    tools: list[dict[str, Any]]
    choice: ToolUseChoice
    turns: list[Turn]
    variables: dict[str, Any]
    thinking: Thinking
    prefilled: bool = False
    format: pb.StructuredOutputs | None = None
    applied_edits: list[dict[str, Any]] = field(default_factory=list)

    def encode(self, model: ServedModel, *, counted: bool = False) -> list[int]:
        """The tokens; a prompt that is only ``counted`` may exceed the context."""
        tools = self.tools if self.tools and self.choice.type != "none" else None
        return encode_chat(
            self.turns,
            model,
            variables=self.variables,
            tools=tools,
            add_generation_prompt=not self.prefilled,
            continue_final_message=self.prefilled,
            truncated=counted,
        )


def read_prompt(
    request: PromptBody, model: ServedModel, ignored: set[str], *, max_tokens: int | None = None
) -> MessagePrompt:
    """Check the fields of a prompt. Raises ``RequestError``."""
    thinking = _thinking(request.thinking, ignored)
    check_thinking(thinking, max_tokens)
    config = OutputConfig.read(request.output_config, ignored, "output_config.", at="output_config")
    management = ContextManagement.read(
        request.context_management, ignored, "context_management.", at="context_management"
    )
    keep = turns_to_keep(management, ignored)
    tools = read_definitions(request.tools, ignored)
    turns = read_conversation(request.system, request.messages, ignored)
    prefilled = turns[-1]["role"] == "assistant"
    if prefilled:
        _check_prefill(turns[-1], thinking)
    return MessagePrompt(
        tools=tools,
        choice=read_choice(request.tool_choice, tools, ignored),
        turns=turns,
        variables=template_variables(thinking, config)
        | check_template_variables(request.chat_template_kwargs),
        thinking=thinking,
        prefilled=prefilled,
        format=read_format(config.format, request.output_format, ignored),
        applied_edits=clear_thinking(turns, keep, model),
    )


def _check_prefill(turn: Turn, thinking: Thinking) -> None:
    """Check the last turn, which the client has begun for the model. Raises ``RequestError``."""
    text = turn["content"]
    if turn.get("tool_calls"):
        problem = "its 'tool_use' blocks need 'tool_result' blocks in a next message"
    elif thinking.enabled and "reasoning_content" not in turn:
        problem = "with 'thinking' it must begin with a block of the type 'thinking'"
    elif not text:
        problem = "its text must not be empty"
    elif text != text.rstrip():
        problem = "final assistant content cannot end with trailing whitespace"
    else:
        return
    raise invalid(f"The last of 'messages' has the role 'assistant': {problem}.", "messages")


def _thinking(thinking: dict[str, Any], ignored: set[str]) -> Thinking:
    """The reasoning of a request; disabled by default, as in Anthropic's API."""
    if not thinking:
        return Thinking(type="disabled")
    return Thinking.read(thinking, ignored, "thinking.", at="thinking")


@contextmanager
def prompt_errors(model: ServedModel) -> Iterator[None]:
    """Turn the errors of a prompt that does not fit into Anthropic's, which make clients shorten
    the conversation or request fewer tokens."""
    try:
        yield
    except ContextError as error:
        limit, length = model.max_model_len, error.length
        message = f"prompt is too long: {length} tokens > {limit} maximum"
        if length < limit:
            message = (
                f"input length and `max_tokens` exceed context limit: {length} + "
                f"{error.requested} > {limit}, decrease input length or `max_tokens` and try again"
            )
        raise invalid(message, error.param, error.code) from None
