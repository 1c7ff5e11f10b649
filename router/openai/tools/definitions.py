"""The tools of a chat request: checked, for the template, and for the parser of the output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ....proto import tandem_pb2 as pb
from ....shared.text.chat_template import ChatTemplate
from ....shared.text.detection import tool_parser
from ....shared.text.tool_parsers.tool_use import ToolUse, is_name
from ...errors import invalid
from ...options import RouterOptions
from ...requests.body_errors import wrong_type
from ...requests.body_model import BodyModel, DocumentedAs
from ...requests.json_size import fits
from ...requests.mcp_tools import McpToolChoice, McpToolRequest
from ...requests.tool_text import TEXT_FORMAT, supports_tools
from ...served_model import ServedModel
from .allowed import AllowedToolsChoice, allowed_tools
from .forced_calls import named_call, required_calls
from .grammars import (
    NO_GRAMMARS,
    ToolGrammars,
    calls_and_text,
    place_of,
    verbatim,
    with_grammars,
)
from .guided_calls import CHANNELS, GuidedTools

MAX_TOOLS = 1024
# Characters and values of all tools of a request.
MAX_SIZE = 1 << 20
CHOICES = ("none", "auto", "required")


class FunctionDefinition(BodyModel):
    """A function that the model may call; ``parameters`` is a JSON schema, which calls follow if it
    is ``strict``, or if the call is forced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BodyModel):
    """A tool. Others than functions are rejected."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BodyModel):
    name: str


class NamedTool(BodyModel):
    """The only tool that the model may call, and must call."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Any], Field(max_length=MAX_TOOLS), DocumentedAs(list[Tool | McpToolRequest])]
ToolChoice = Annotated[
    Any, DocumentedAs(Literal[CHOICES] | NamedTool | AllowedToolsChoice | McpToolChoice)
]
Functions = Annotated[
    list[Any], Field(max_length=MAX_TOOLS), DocumentedAs(list[FunctionDefinition])
]
FunctionChoice = Annotated[Any, DocumentedAs(Literal["none", "auto"] | NamedFunction)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """What a request wants of tools: ``shown`` are those that the template gets, ``use`` is
    ``None`` if the output has no calls, ``forced`` constrains it to calls, and ``guided``
    constrains the calls that it may have."""

    shown: list[dict[str, Any]] | None = None
    use: ToolUse | None = None
    forced: pb.StructuredOutputs | None = None
    guided: pb.StructuredOutputs | None = None

    def constrain(self, sampling: pb.Sampling) -> None:
        """Let the output be calls, if they are forced. A format of the answer's text no longer
        matters then; otherwise it matters more than the calls that there may be."""
        if self.forced is not None:
            sampling.structured_outputs.CopyFrom(self.forced)
        elif self.guided is not None and not sampling.HasField("structured_outputs"):
            sampling.structured_outputs.CopyFrom(self.guided)


NO_TOOLS = ToolRequest()


def read_tools(
    tools: list[Any],
    choice: Any,
    parallel: bool,
    model: ServedModel,
    options: RouterOptions,
    ignored: set[str],
    template: ChatTemplate | None = None,
    grammars: ToolGrammars = NO_GRAMMARS,
    *,
    schema_place: str = "tools[{}].function.parameters",
) -> ToolRequest:
    """Check ``tools`` and ``tool_choice``, for ``template`` or the model's. The ``grammars`` are
    those of functions by their names; ``schema_place`` names a schema in errors. Raises
    ``RequestError``."""
    if not tools:
        if choice not in (None, "none", "auto"):
            message = "When using 'tool_choice', 'tools' must be set."
            raise invalid(message, "tool_choice", "missing_required_parameter")
        return NO_TOOLS
    known = _known(tools, ignored, schema_place)
    allowed = allowed_tools(choice, known.schemas, ignored)
    if allowed is not None:
        known, choice = known.only(allowed.names), allowed.mode
    named = _named(choice, known)
    if choice == "none":
        hidden = options.exclude_tools_when_tool_choice_none
        return NO_TOOLS if hidden else ToolRequest(shown=known.shown)
    if choice in (None, "auto"):
        _check_automatic(options)
    use = ToolUse(
        parser=_parser(template or model.tokenizer.tool_template, options),
        schemas=with_grammars(known.schemas, grammars),
        parallel=parallel,
        required=choice == "required",
        named=named,
    )
    asked = ToolRequest(shown=known.shown, use=use)
    if use.parser == CHANNELS and (use.named or use.required):
        return _in_channels(asked, grammars, known.strict)
    if use.named or use.required:
        return _forced(asked, grammars)
    return _guided(asked, grammars, known.strict)


def _parser(template: ChatTemplate | None, options: RouterOptions) -> str:
    source = "" if template is None else template.source
    if not supports_tools(source):
        return TEXT_FORMAT
    return tool_parser(options.tool_call_parser, source)


def _forced(tools: ToolRequest, grammars: ToolGrammars) -> ToolRequest:
    """The constraint to calls, and how they are found in an output that follows it."""
    use = tools.use
    assert use is not None
    schemas = {use.named: use.schemas[use.named]} if use.named else use.schemas
    place, texts = place_of(grammars, schemas), verbatim(grammars, schemas)
    if texts:
        forced = calls_and_text(schemas, texts, parallel=use.parallel, param=place)
        use = replace(use, schemas=schemas, required=True, named="", verbatim=_arguments(texts))
    elif use.named:
        forced = named_call(schemas[use.named], place)
    else:
        forced = required_calls(schemas, parallel=use.parallel, param=place)
    return replace(tools, use=use, forced=forced)


def _in_channels(
    tools: ToolRequest, grammars: ToolGrammars, strict: Mapping[str, str]
) -> ToolRequest:
    """Calls that are forced, of a model that writes channels: an answer that is nothing but calls
    would have no reasoning."""
    use = tools.use
    assert use is not None
    schemas = {use.named: use.schemas[use.named]} if use.named else use.schemas
    strict = {name: strict.get(name, "tool_choice") for name in schemas}
    use = replace(use, required=False, named="", schemas=schemas)
    guided = _guided(replace(tools, use=use), grammars, strict, required=True)
    return replace(guided, forced=guided.guided)


def _guided(
    tools: ToolRequest,
    grammars: ToolGrammars,
    strict: Mapping[str, str],
    *,
    required: bool = False,
) -> ToolRequest:
    """The constraint of calls that the model may make."""
    use = tools.use
    assert use is not None
    own = {name: grammar for name, grammar in grammars.items() if name in use.schemas}
    guided = GuidedTools(parser=use.parser, schemas=use.schemas, grammars=own, strict=strict)
    wanted = guided.constraint(required=required)
    if wanted is None:
        return tools
    arguments = _arguments(guided.texts())
    return replace(tools, use=replace(use, verbatim=arguments), guided=wanted)


def _arguments(texts: ToolGrammars) -> dict[str, str]:
    return {name: grammar.argument for name, grammar in texts.items()}


def shown_tools(tools: list[Any], ignored: set[str]) -> list[dict[str, Any]] | None:
    """Check tools that are only shown to the model. Raises ``RequestError``."""
    if not tools:
        return None
    return _known(tools, ignored).shown


def _known(tools: list[Any], ignored: set[str], schema_place: str = "") -> _Functions:
    if not fits(tools, MAX_SIZE):
        message = f"Invalid 'tools': they have more than {MAX_SIZE} characters and values."
        raise invalid(message, "tools", "too_large")
    known = _Functions()
    for i, tool in enumerate(tools):
        known.add(tool, f"tools[{i}]", schema_place.format(i), ignored)
    return known


@dataclass(slots=True)
class _Functions:
    """The functions of a request: in the form that templates expect, their schemas, and the places
    of those that are strict."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    strict: dict[str, str] = field(default_factory=dict)

    def add(self, tool: Any, param: str, schema_place: str, ignored: set[str]) -> None:
        if not isinstance(tool, dict):
            raise wrong_type(param, "an object", tool)
        if tool.get("type") != "function":
            message = f"'{param}.type' must be 'function'; other kinds of tools are not supported."
            if tool.get("type") == "mcp":
                message = (
                    f"'{param}.type': tools of MCP servers need a router with --mcp-config, and "
                    "/v1/chat/completions or /v1/responses."
                )
            raise invalid(message, f"{param}.type", "unsupported_value")
        function = FunctionDefinition.read(
            tool.get("function"), ignored, "tools[].function.", at=f"{param}.function"
        )
        if not is_name(function.name):
            raise invalid(
                f"Invalid '{param}.function.name': {function.name[:64]!r}; a name has 1 to 256 "
                f"letters, digits and characters of _.:/@$-",
                f"{param}.function.name",
                "invalid_value",
            )
        if function.name in self.schemas:
            message = f"'{param}.function.name': there are two tools named '{function.name}'."
            raise invalid(message, f"{param}.function.name", "duplicate_tool")
        self.schemas[function.name] = function.parameters or {}
        if function.strict and function.parameters:
            self.strict[function.name] = schema_place
        shown = {"name": function.name}
        for name in ("description", "parameters"):
            if (value := getattr(function, name)) is not None:
                shown[name] = value
        self.shown.append({"type": "function", "function": shown})

    def only(self, names: Collection[str]) -> _Functions:
        """Some of the functions; a model never calls one that it does not see."""
        shown = [tool for tool in self.shown if tool["function"]["name"] in names]
        strict = {name: place for name, place in self.strict.items() if name in names}
        return _Functions(shown, {name: self.schemas[name] for name in names}, strict)


def _named(choice: Any, known: _Functions) -> str:
    """The function that ``tool_choice`` names, if it names one."""
    if choice is None or choice in CHOICES:
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise invalid(
            f"Invalid value for 'tool_choice': it must be one of {', '.join(CHOICES)}, or name a "
            f"function as {{'type': 'function', 'function': {{'name': ...}}}}.",
            "tool_choice",
            "invalid_value",
        )
    if name not in known.schemas:
        message = f"'tool_choice' names the function '{name[:64]}', which is not in 'tools'."
        raise invalid(message, "tool_choice", "invalid_value")
    return name


def _check_automatic(options: RouterOptions) -> None:
    if not options.enable_auto_tool_choice:
        message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser.'
        raise invalid(message, "tool_choice", "unsupported_value")
