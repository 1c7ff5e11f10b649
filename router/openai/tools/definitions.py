"""The tools of a chat request: checked, and converted for the template and the output parser."""

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
# Characters and values in all tools of a request.
MAX_SIZE = 1 << 20
CHOICES = ("none", "auto", "required")


class FunctionDefinition(BodyModel):
    """A function that the model may call. Calls follow ``parameters``, a JSON schema, if it is
    ``strict`` or the call is forced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BodyModel):
    """A tool; only functions are supported."""

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
    """The tools of a request: ``definitions`` for the template; ``use``, which is ``None`` if the
    output has no calls; ``forced``, which constrains the output to calls; and ``guided``, which
    constrains calls that the model chooses to make."""

    definitions: list[dict[str, Any]] | None = None
    use: ToolUse | None = None
    forced: pb.StructuredOutputs | None = None
    guided: pb.StructuredOutputs | None = None

    def constrain(self, sampling: pb.Sampling) -> None:
        """Add the constraint on calls. Forced calls replace the client's constraint on the text;
        otherwise the client's takes precedence."""
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
    """Check ``tools`` and ``tool_choice``, for ``template`` or the model's own. ``grammars`` are
    keyed by function name; ``schema_place`` names a schema in errors. Raises ``RequestError``."""
    if not tools:
        if choice not in (None, "none", "auto"):
            message = "When using 'tool_choice', 'tools' must be set."
            raise invalid(message, "tool_choice", "missing_required_parameter")
        return NO_TOOLS
    functions = _functions(tools, ignored, schema_place)
    allowed = allowed_tools(choice, functions.schemas, ignored)
    if allowed is not None:
        functions, choice = functions.only(allowed.names), allowed.mode
    name = _function_name(choice, functions)
    if choice == "none":
        excluded = options.exclude_tools_when_tool_choice_none
        return NO_TOOLS if excluded else ToolRequest(definitions=functions.definitions)
    if choice in (None, "auto"):
        _check_automatic(options)
    use = ToolUse(
        parser=_parser(template or model.tokenizer.tool_template, options),
        schemas=with_grammars(functions.schemas, grammars),
        parallel=parallel,
        required=choice == "required",
        named=name,
    )
    request = ToolRequest(definitions=functions.definitions, use=use)
    if use.parser == CHANNELS and (use.named or use.required):
        return _in_channels(request, grammars, functions.strict)
    if use.named or use.required:
        return _forced(request, grammars)
    return _guided(request, grammars, functions.strict)


def _parser(template: ChatTemplate | None, options: RouterOptions) -> str:
    source = "" if template is None else template.source
    if not supports_tools(source):
        return TEXT_FORMAT
    return tool_parser(options.tool_call_parser, source)


def _forced(tools: ToolRequest, grammars: ToolGrammars) -> ToolRequest:
    """Constrain the output to calls, and adapt the parsing to that constraint."""
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
    """Force calls from a model that writes channels: output that consists of calls only would have
    no reasoning."""
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
    """Constrain the calls that the model may make."""
    use = tools.use
    assert use is not None
    own = {name: grammar for name, grammar in grammars.items() if name in use.schemas}
    guided = GuidedTools(parser=use.parser, schemas=use.schemas, grammars=own, strict=strict)
    constraint = guided.constraint(required=required)
    if constraint is None:
        return tools
    arguments = _arguments(guided.texts())
    return replace(tools, use=replace(use, verbatim=arguments), guided=constraint)


def _arguments(texts: ToolGrammars) -> dict[str, str]:
    return {name: grammar.argument for name, grammar in texts.items()}


def shown_tools(tools: list[Any], ignored: set[str]) -> list[dict[str, Any]] | None:
    """Check tools that the template only shows to the model. Raises ``RequestError``."""
    if not tools:
        return None
    return _functions(tools, ignored).definitions


def _functions(tools: list[Any], ignored: set[str], schema_place: str = "") -> _Functions:
    if not fits(tools, MAX_SIZE):
        message = f"Invalid 'tools': they have more than {MAX_SIZE} characters and values."
        raise invalid(message, "tools", "too_large")
    functions = _Functions()
    for i, tool in enumerate(tools):
        functions.add(tool, f"tools[{i}]", schema_place.format(i), ignored)
    return functions


@dataclass(slots=True)
class _Functions:
    """The functions of a request in the form that templates expect, their schemas, and the places
    of strict schemas."""

    definitions: list[dict[str, Any]] = field(default_factory=list)
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
        definition = {"name": function.name}
        for name in ("description", "parameters"):
            if (value := getattr(function, name)) is not None:
                definition[name] = value
        self.definitions.append({"type": "function", "function": definition})

    def only(self, names: Collection[str]) -> _Functions:
        """A subset of the functions, for the template and the parser alike."""
        definitions = [tool for tool in self.definitions if tool["function"]["name"] in names]
        strict = {name: place for name, place in self.strict.items() if name in names}
        return _Functions(definitions, {name: self.schemas[name] for name in names}, strict)


def _function_name(choice: Any, functions: _Functions) -> str:
    """The name of the function that ``tool_choice`` forces; empty if none."""
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
    if name not in functions.schemas:
        message = f"'tool_choice' names the function '{name[:64]}', which is not in 'tools'."
        raise invalid(message, "tool_choice", "invalid_value")
    return name


def _check_automatic(options: RouterOptions) -> None:
    if not options.enable_auto_tool_choice:
        message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser.'
        raise invalid(message, "tool_choice", "unsupported_value")
