"""The tools of a response: OpenAI's kinds of them, as the functions of chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from ...shared.errors import RequestError
from ..errors import invalid
from ..openai.structured_outputs import constraint
from ..openai.tools.grammars import ToolGrammar, closes_only_its_groups
from ..requests.body_errors import too_long, wrong_type
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.mcp_fields import ApprovalMode, McpApprovalFilter
from ..requests.renamed_errors import fields_renamed

FUNCTION, MCP, CUSTOM, NAMESPACE = "function", "mcp", "custom", "namespace"
KINDS = (FUNCTION, CUSTOM, NAMESPACE, MCP)
MAX_NAME = 128
MAX_TOOLS = 1024  # of a namespace
# Tools that OpenAI's servers run, or that its models know without a definition.
BUILT_IN = frozenset(
    (
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    )
)
# The input of a custom tool, which is a text, as a function's.
INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
# Characters of a grammar, as many as a node compiles.
MAX_DEFINITIONS = {"regex": 16 * 1024, "lark": 128 * 1024}
# Arguments of a custom tool as they should be. Others are parsed up to this length only, because an
# object of many values takes long.
_ONLY_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*\}\s*', re.DOTALL)
MAX_OTHER_ARGUMENTS = 64 * 1024
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class CustomFormat(BodyModel):
    """The format of a custom tool's input; a grammar has a syntax and a definition."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    def grammar(self, place: str) -> ToolGrammar | None:
        """The grammar of the input; ``None`` for any text. Raises ``RequestError``."""
        if self.type == "text":
            return None
        syntax, definition = self.syntax, self.definition
        for name, value in (("syntax", syntax), ("definition", definition)):
            if value is None:
                message = f"Missing required parameter: '{place}.{name}'."
                raise invalid(message, f"{place}.{name}", "missing_required_parameter")
        assert syntax is not None and definition is not None
        place = f"{place}.definition"
        most = MAX_DEFINITIONS[syntax]
        if len(definition) > most:
            raise too_long(place, definition, most)
        constraint("grammar", definition, place)  # raises if the text is not one
        if syntax == "regex" and not closes_only_its_groups(definition):
            message = f"Invalid '{place}': it closes a group that it has not opened."
            raise invalid(message, place, "invalid_value")
        return ToolGrammar(syntax=syntax, definition=definition, argument=INPUT, place=place)


class CustomTool(BodyModel):
    """A tool that the client runs, whose input is a text."""

    type: Literal["custom"]
    name: Name
    description: str = ""
    format: Annotated[dict[str, Any], DocumentedAs(CustomFormat)] | None = None
    defer_loading: Any = None

    def as_function(self, grammar: ToolGrammar | None) -> dict[str, Any]:
        """The function that stands for it in the prompt."""
        about = [self.description]
        if grammar is not None:
            syntax = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
            about.append(f"The input matches this {syntax}:\n{grammar.definition}")
        description = "\n\n".join(filter(None, about))
        return {"description": description, "parameters": CUSTOM_PARAMETERS}


class NamespaceTool(BodyModel):
    """Tools whose names are their own in a namespace. Its description begins that of the first."""

    type: Literal["namespace"]
    name: Name
    description: str = ""
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)]


class ResponseTool(BodyModel):
    """A function or a custom tool that the client runs, a namespace of them, or an MCP server of
    the router's, which runs its tools."""

    type: Literal["function", "custom", "namespace", "mcp"]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[dict[str, Any]] | None = None
    server_label: str | None = None
    server_description: str | None = None
    allowed_tools: list[str] | dict[str, Any] | None = None
    require_approval: ApprovalMode | McpApprovalFilter | None = None


class NamedResponseTool(BodyModel):
    """One tool, or the tools of an MCP server."""

    type: Literal["function", "custom", "mcp"]
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


class AllowedResponseTools(BodyModel):
    """A part of the tools, of which the model may or must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedResponseTool]


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A function of the chat, as the client of the response knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ResponseTools:
    """The tools of a request: ``chat`` as chat completions have them, ``called`` by the names that
    they have there, as the ``grammars`` are, and ``places`` in the request."""

    chat: list[Any] = field(default_factory=list)
    called: dict[str, CalledTool] = field(default_factory=dict)
    grammars: dict[str, ToolGrammar] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    def place_of(self, param: str) -> str:
        """The place in the request of a schema, whose place among the chat's tools is ``param``."""
        found = re.fullmatch(r"tools\[(\d+)\]\.function(\..*)", param)
        return param if found is None else self.places[int(found[1])] + found[2]

    @contextmanager
    def places_in_errors(self) -> Iterator[None]:
        """Name the tools in the error of the block by their places in the request."""
        try:
            yield
        except RequestError:
            indexed = enumerate(self.places)
            names = [(re.compile(rf"^tools\[{i}\](\.function\b)?"), at) for i, at in indexed]
            with fields_renamed(names):
                raise


def read_response_tools(tools: list[Any], ignored: set[str]) -> ResponseTools:
    """Convert tools. Built-in ones are left out if there are others, since a model need not use
    them; their types are added to ``ignored``. Raises ``RequestError``."""
    reader = _ToolReader(ignored)
    for i, tool in enumerate(tools):
        reader.add(tool, f"tools[{i}]")
    if tools and not reader.read.places and reader.built_in is not None:
        raise _unsupported(reader.built_in, "tools[0]")
    return reader.read


class _ToolReader:
    """Reads tools one by one; ``built_in`` is the type of the first that was left out."""

    def __init__(self, ignored: set[str]) -> None:
        self.read = ResponseTools()
        self.built_in: str | None = None
        self._ignored = ignored

    def add(self, tool: Any, param: str) -> None:
        kind = _kind(tool, param)
        if kind == NAMESPACE:
            self._add_namespace(tool, param)
        elif kind == MCP:
            self._offer(tool, param)
        elif kind in BUILT_IN:
            self.built_in = self.built_in or kind
            self._ignored.add(f"tools[].type: {kind}")
        else:
            self._add_called(kind, tool, param, None)

    def _add_namespace(self, tool: dict[str, Any], param: str) -> None:
        space = NamespaceTool.read(tool, self._ignored, "tools[].", at=param)
        about = space.description
        for i, inner in enumerate(space.tools):
            at = f"{param}.tools[{i}]"
            kind = _kind(inner, at)
            if about and isinstance(inner.get("description", ""), str):
                inner = inner | {"description": f"{about}\n\n{inner.get('description', '')}"}
            about = ""
            self._add_called(kind, inner, at, space.name)

    def _add_called(
        self, kind: Any, tool: dict[str, Any], param: str, namespace: str | None
    ) -> None:
        grammar = None
        if kind == CUSTOM:
            custom = CustomTool.read(tool, self._ignored, "tools[].", at=param)
            grammar = self._grammar(custom.format, f"{param}.format")
            function = custom.as_function(grammar)
        elif kind == FUNCTION:
            function = _without(tool, "type", "name", "defer_loading")
        else:
            raise _unsupported(kind, param)
        name = tool.get("name")
        if isinstance(name, str):
            full = chat_name(name, namespace)
            self.read.called[full] = CalledTool(name, namespace, custom=kind == CUSTOM)
            name = full
            if grammar is not None:
                self.read.grammars[full] = grammar
        named = {} if name is None else {"name": name}
        self._offer({"type": FUNCTION, FUNCTION: named | function}, param)

    def _grammar(self, layout: dict[str, Any] | None, param: str) -> ToolGrammar | None:
        if layout is None:
            return None
        return CustomFormat.read(layout, self._ignored, "tools[].format.", at=param).grammar(param)

    def _offer(self, tool: dict[str, Any], param: str) -> None:
        self.read.chat.append(tool)
        self.read.places.append(param)


def _kind(tool: Any, param: str) -> Any:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    kind = tool.get("type")
    return kind if isinstance(kind, str) else None


def _unsupported(kind: Any, param: str) -> RequestError:
    return invalid(
        f"'{param}.type': tools of the type {kind!r:.64} are not supported by this server; it "
        f"has {', '.join(KINDS)}.",
        f"{param}.type",
        "unsupported_value",
    )


def chat_name(name: str, namespace: str | None) -> str:
    """The name of a tool in the prompt."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool: the model may have written it as such."""
    if len(arguments) > MAX_OTHER_ARGUMENTS and not _ONLY_INPUT.fullmatch(arguments):
        return arguments
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get(INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def chat_tool_choice(choice: Any) -> Any:
    """The ``tool_choice`` as chat completions have it."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in (FUNCTION, CUSTOM):
        return {"type": FUNCTION, FUNCTION: _named(choice)}
    if kind == "allowed_tools":
        allowed = _without(choice, "type")
        if isinstance(allowed.get("tools"), list):
            allowed["tools"] = [chat_tool_choice(tool) for tool in allowed["tools"]]
        return {"type": kind, kind: allowed}
    return choice


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    name, namespace = choice.get("name"), choice.get("namespace")
    named = _without(choice, "type", "namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        named["name"] = chat_name(name, namespace)
    return named


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the response repeats it."""
    if tool["type"] == MCP:
        return {"allowed_tools": None, "require_approval": "never", "headers": None} | tool
    if tool["type"] == FUNCTION:
        return {"description": None, "parameters": None, "strict": None} | tool
    return tool


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in names}
