"""The structured output of a message: ``output_config.format``, and its older name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ..errors import invalid
from ..openai.structured_outputs import constraint
from ..requests.body_model import BodyModel

PARAM = "output_config.format"
OLDER_PARAM = "output_format"


class OutputFormat(BodyModel):
    """The text of the message is JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


def read_format(
    newer: dict[str, Any] | None, older: dict[str, Any] | None, ignored: set[str]
) -> pb.StructuredOutputs | None:
    """The constraint of a request, under its ``newer`` or ``older`` name. Raises
    ``RequestError``."""
    if newer is not None and older is not None:
        message = f"'{PARAM}' and '{OLDER_PARAM}' both constrain the output; set one of them."
        raise invalid(message, OLDER_PARAM, "invalid_value")
    param = OLDER_PARAM if newer is None else PARAM
    value = older if newer is None else newer
    if value is None or (param == OLDER_PARAM and value == {"type": "text"}):
        return None
    schema = value.get("schema")
    if value.get("type") != "json_schema" or not isinstance(schema, dict):
        message = f"Invalid '{param}': it must have the type 'json_schema' and a 'schema' object."
        raise invalid(message, param, "invalid_value")
    ignored |= {f"{param}.{name[:64]}" for name in value if name not in ("type", "schema", "name")}
    return constraint("json", schema, f"{param}.schema")
