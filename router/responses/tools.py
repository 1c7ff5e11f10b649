"""The tools of a response, converted to functions of chat completions."""

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
from ..requests.body_errors import fields_renamed, too_long, wrong_type
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.mcp_tools import ApprovalMode, McpApprovalFilter

FUNCTION, MCP, CUSTOM, NAMESPACE = "function", "mcp", "custom", "namespace"
KINDS = (FUNCTION, CUSTOM, NAMESPACE, MCP)
MAX_NAME = 128
MAX_TOOLS = 1024  # of a namespace
# Tools that OpenAI runs, or that its models know without a definition.
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
# A custom tool's input is text. For the model it is a function with this parameter.
INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
# Maximum characters of a grammar, as on nodes.
MAX_DEFINITIONS = {"regex": 16 * 1024, "lark": 128 * 1024}
# Valid arguments of a custom tool. Others are parsed up to this length only, because an object with
# many values takes long.
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
        max_characters = MAX_DEFINITIONS[syntax]
        if len(definition) > max_characters:
            raise too_long(place, definition, max_characters)
        constraint("grammar", definition, place)  # raises for an invalid one
        if syntax == "regex" and not closes_only_its_groups(definition):
            message = f"Invalid '{place}': it closes a group that it did not open."
            raise invalid(message, place, "invalid_value")
        return ToolGrammar(syntax=syntax, definition=definition, argument=INPUT, place=place)


class CustomTool(BodyModel):
    """A tool with text input, which the client runs."""

    type: Literal["custom"]
    name: Name
    description: str = ""
    format: Annotated[dict[str, Any], DocumentedAs(CustomFormat)] | None = None
    defer_loading: Any = None

    def as_function(self, grammar: ToolGrammar | None) -> dict[str, Any]:
        """The function for the prompt."""
        parts = [self.description]
        if grammar is not None:
            syntax = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
            parts.append(f"The input matches this {syntax}:\n{grammar.definition}")
        description = "\n\n".join(filter(None, parts))
        return {"description": description, "parameters": CUSTOM_PARAMETERS}


class NamespaceTool(BodyModel):
    """Tools in a namespace. Its description is put before that of its first tool."""

    type: Literal["namespace"]
    name: Name
    description: str = ""
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)]


class ResponseTool(BodyModel):
    """A function or a custom tool, which the client runs, a namespace of such tools, or an MCP
    server, whose tools the router runs."""

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
    """Some of the tools; the model may or must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedResponseTool]


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools


@dataclass(frozen=True, slots=True)
class ClientTool:
    """The client's name and kind of a function of the chat."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ResponseTools:
    """The tools of a request. ``chat`` are the tools for chat completions, ``places`` their places
    in the request. ``client_tools`` and ``grammars`` are by the names of functions in the chat."""

    chat: list[Any] = field(default_factory=list)
    client_tools: dict[str, ClientTool] = field(default_factory=dict)
    grammars: dict[str, ToolGrammar] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    def place_of(self, param: str) -> str:
        """The place in the request of the schema at ``param`` in the chat."""
        match = re.fullmatch(r"tools\[(\d+)\]\.function(\..*)", param)
        return param if match is None else self.places[int(match[1])] + match[2]

    @contextmanager
    def places_in_errors(self) -> Iterator[None]:
        """Replace the chat's places of tools in errors that the block raises."""
        try:
            yield
        except RequestError:
            indexed = enumerate(self.places)
            names = [(re.compile(rf"^tools\[{i}\](\.function\b)?"), at) for i, at in indexed]
            with fields_renamed(names):
                raise


def read_response_tools(tools: list[Any], ignored: set[str]) -> ResponseTools:
    """Convert tools. Built-in tools are left out if there are others, and their types are added to
    ``ignored``. Raises ``RequestError``."""
    reader = _ToolReader(ignored)
    for i, tool in enumerate(tools):
        reader.add(tool, f"tools[{i}]")
    if tools and not reader.tools.places and reader.built_in is not None:
        raise _unsupported(reader.built_in, "tools[0]")
    return reader.tools


class _ToolReader:
    """Converts tools one by one; ``built_in`` is the type of the first one that was left out."""

    def __init__(self, ignored: set[str]) -> None:
        self.tools = ResponseTools()
        self.built_in: str | None = None
        self._ignored = ignored

    def add(self, tool: Any, param: str) -> None:
        kind = _kind(tool, param)
        if kind == NAMESPACE:
            self._add_namespace(tool, param)
        elif kind == MCP:
            self._append(tool, param)
        elif kind in BUILT_IN:
            self.built_in = self.built_in or kind
            self._ignored.add(f"tools[].type: {kind}")
        else:
            self._add_client_tool(kind, tool, param, None)

    def _add_namespace(self, tool: dict[str, Any], param: str) -> None:
        space = NamespaceTool.read(tool, self._ignored, "tools[].", at=param)
        prefix = space.description
        for i, inner in enumerate(space.tools):
            at = f"{param}.tools[{i}]"
            kind = _kind(inner, at)
            if prefix and isinstance(inner.get("description", ""), str):
                inner = inner | {"description": f"{prefix}\n\n{inner.get('description', '')}"}
            prefix = ""
            self._add_client_tool(kind, inner, at, space.name)

    def _add_client_tool(
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
            full_name = chat_name(name, namespace)
            self.tools.client_tools[full_name] = ClientTool(name, namespace, custom=kind == CUSTOM)
            name = full_name
            if grammar is not None:
                self.tools.grammars[full_name] = grammar
        name_field = {} if name is None else {"name": name}
        self._append({"type": FUNCTION, FUNCTION: name_field | function}, param)

    def _grammar(self, layout: dict[str, Any] | None, param: str) -> ToolGrammar | None:
        if layout is None:
            return None
        return CustomFormat.read(layout, self._ignored, "tools[].format.", at=param).grammar(param)

    def _append(self, tool: dict[str, Any], param: str) -> None:
        self.tools.chat.append(tool)
        self.tools.places.append(param)


def _kind(tool: Any, param: str) -> Any:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    kind = tool.get("type")
    return kind if isinstance(kind, str) else None


def _unsupported(kind: Any, param: str) -> RequestError:
    return invalid(
        f"'{param}.type': tools of the type {kind!r:.64} are not supported by this server; use "
        f"{', '.join(KINDS)}.",
        f"{param}.type",
        "unsupported_value",
    )


def chat_name(name: str, namespace: str | None) -> str:
    """The name of a tool in the prompt."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """A custom tool's input as arguments of its function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input in the arguments of a custom tool's function. A model may also have written the
    input itself instead of JSON."""
    if len(arguments) > MAX_OTHER_ARGUMENTS and not _ONLY_INPUT.fullmatch(arguments):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def chat_tool_choice(choice: Any) -> Any:
    """The ``tool_choice`` of the chat completion."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in (FUNCTION, CUSTOM):
        return {"type": FUNCTION, FUNCTION: _function_name(choice)}
    if kind == "allowed_tools":
        allowed = _without(choice, "type")
        if isinstance(allowed.get("tools"), list):
            allowed["tools"] = [chat_tool_choice(tool) for tool in allowed["tools"]]
        return {"type": kind, kind: allowed}
    return choice


def _function_name(choice: dict[str, Any]) -> dict[str, Any]:
    name, namespace = choice.get("name"), choice.get("namespace")
    function = _without(choice, "type", "namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        function["name"] = chat_name(name, namespace)
    return function


def tool_body(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of the request as the response repeats it."""
    if tool["type"] == MCP:
        return {"allowed_tools": None, "require_approval": "never", "headers": None} | tool
    if tool["type"] == FUNCTION:
        return {"description": None, "parameters": None, "strict": None} | tool
    return tool


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}
