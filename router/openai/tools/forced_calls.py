"""The constraint of ``tool_choice``: a schema of the calls that an output must consist of, so that
any model makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....proto import tandem_pb2 as pb
from ..structured_outputs import constraint

_PARAM = "tool_choice"
_ANY_OBJECT = {"type": "object"}
# What else would say to where the references in a schema lead.
_NAMES = ("$schema", "$id", "id")


def named_call(schema: Mapping[str, Any], param: str = _PARAM) -> pb.StructuredOutputs:
    """An output that is the arguments of one function. Errors name ``param``."""
    return _compact(dict(schema or _ANY_OBJECT), param)


def required_calls(
    schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool, param: str = _PARAM
) -> pb.StructuredOutputs:
    """An output that is an array of calls, of a single one unless they may be ``parallel``. Errors
    of the node name ``param``. Raises ``RequestError``."""
    calls = [_call(name, schema, i) for i, (name, schema) in enumerate(schemas.items())]
    most = {} if parallel else {"maxItems": 1}
    array = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}
    return _compact(array, param)


def _compact(schema: dict[str, Any], param: str) -> pb.StructuredOutputs:
    """Without optional white space: some models would write nothing else until the end."""
    made = constraint("json", schema, param)
    made.compact = True
    return made


def _call(name: str, schema: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A call; the references of its schema lead to that schema, which has an id of its own."""
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
