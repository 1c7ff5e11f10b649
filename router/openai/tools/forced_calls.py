"""The constraint of ``tool_choice``: a JSON schema of calls that the whole output follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....proto import tandem_pb2 as pb
from ..structured_outputs import constraint

_PARAM = "tool_choice"
_ANY_OBJECT = {"type": "object"}
# Keywords that would rebase the references in a schema.
_NAMES = ("$schema", "$id", "id")


def named_call(schema: Mapping[str, Any], param: str = _PARAM) -> pb.StructuredOutputs:
    """Output that is the arguments of one function. Errors name ``param``."""
    return _compact(dict(schema or _ANY_OBJECT), param)


def required_calls(
    schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool, param: str = _PARAM
) -> pb.StructuredOutputs:
    """Output that is an array of calls: a single one unless ``parallel``. The node's errors name
    ``param``. Raises ``RequestError``."""
    calls = [_call(name, schema, i) for i, (name, schema) in enumerate(schemas.items())]
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        array["maxItems"] = 1
    return _compact(array, param)


def _compact(schema: dict[str, Any], param: str) -> pb.StructuredOutputs:
    """The constraint without optional white space, which some models would write until the end."""
    outputs = constraint("json", schema, param)
    outputs.compact = True
    return outputs


def _call(name: str, schema: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The schema of a call. The function's schema has an id of its own, so that its references stay
    within it."""
    parameters = {key: value for key, value in schema.items() if key not in _NAMES} or _ANY_OBJECT
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "parameters": {"$id": f"tandem:{number}", **parameters},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
