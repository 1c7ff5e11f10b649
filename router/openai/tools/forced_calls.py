"""The constraint of ``tool_choice``: a schema of the calls that an output must consist of, so that
any model makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....proto import tandem_pb2 as pb
from ...errors import invalid
from ..structured_outputs import constraint

_PARAM = "tool_choice"
# References in a tool's schema begin at its root, where it keeps what they name.
_DEFINITIONS = ("$defs", "definitions")
_ANY_OBJECT = {"type": "object"}


def named_call(schema: Mapping[str, Any], param: str = _PARAM) -> pb.StructuredOutputs:
    """An output that is the arguments of one function. Errors name ``param``."""
    return _compact(dict(schema or _ANY_OBJECT), param)


def required_calls(
    schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool, param: str = _PARAM
) -> pb.StructuredOutputs:
    """An output that is an array of calls, of a single one unless they may be ``parallel``. Errors
    of the node name ``param``. Raises ``RequestError``."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call(name, schema, definitions) for name, schema in schemas.items()]
    most = {} if parallel else {"maxItems": 1}
    array = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most, **definitions}
    return _compact(array, param)


def _compact(schema: dict[str, Any], param: str) -> pb.StructuredOutputs:
    """Without optional white space: some models would write nothing else until the end."""
    made = constraint("json", schema, param)
    made.compact = True
    return made


def _call(
    name: str, schema: Mapping[str, Any], definitions: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    parameters = dict(schema or _ANY_OBJECT)
    for keyword in _DEFINITIONS:
        if isinstance(own := parameters.pop(keyword, None), dict):
            _add(definitions.setdefault(keyword, {}), own, name)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _add(definitions: dict[str, Any], own: Mapping[str, Any], tool: str) -> None:
    for name, schema in own.items():
        if definitions.setdefault(name, schema) != schema:
            message = (
                f"'tools': '{tool}' and another tool define '{name[:64]}' differently; with "
                f"'tool_choice' 'required' the definitions of all tools are shared."
            )
            raise invalid(message, "tools", "invalid_value")
