"""Request bodies as pydantic models, with OpenAI's error messages.

Values whose check needs the model, such as token ids, and long arrays, such as prompts, are checked
elsewhere: pydantic holds the GIL while it checks a whole array.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from ..errors import invalid
from .body_errors import to_request_error, wrong_type

# Unknown fields to record of one request.
MAX_IGNORED = 16
# The smallest integers that do not fit protobuf's signed types.
INT32, INT64 = 2**31, 2**63
_LARGEST = int(sys.float_info.max)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bounded(value: Any) -> Any:
    too_large = type(value) is int and abs(value) > _LARGEST
    return sys.float_info.max * (1 if value > 0 else -1) if too_large else value


def _named_boolean(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


# vLLM accepts the strings "true" and "false" too.
NAMED_BOOLEAN = BeforeValidator(_named_boolean)
# Some clients write 100.0 for an integer, which vLLM accepts too.
WHOLE = BeforeValidator(_whole)
# JSON's integers are unlimited. One that no double can hold is reported as out of range.
BOUNDED = BeforeValidator(_bounded)


class BodyModel(BaseModel):
    """A JSON object of a request. ``null`` means the default, as in OpenAI's API.

    Fields are checked in the order of their declaration, and the first error is reported.
    ``unsupported`` has the fields that are not implemented, with the values that are accepted
    because they have no effect. Unknown fields are ignored, as in vLLM.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, body: Any, ignored: set[str], within: str = "", *, at: str = "") -> Self:
        """Check an object; ``at`` is its place for errors. Adds unknown fields to ``ignored``, with
        the prefix ``within``. Raises ``RequestError``."""
        if not isinstance(body, dict):
            if at:
                raise wrong_type(at, "an object", body)
            raise invalid("The request body must be a JSON object.")
        fields = {name: value for name, value in body.items() if value is not None}
        if not fields.keys() <= cls.__pydantic_fields__.keys():
            cls._check_names(fields, ignored, within, at)
        try:
            # model_validate does the same, but takes half as long again.
            checked: Self = cls.__pydantic_validator__.validate_python(fields)
            return checked
        except ValidationError as error:
            raise to_request_error(error, fields, at) from None

    @classmethod
    def _check_names(cls, fields: dict[str, Any], ignored: set[str], within: str, at: str) -> None:
        for name, value in fields.items():
            if name in cls.unsupported:
                if value not in cls.unsupported[name]:
                    place = f"{at}.{name}" if at else name
                    message = f"'{place}' is not supported by this server; leave it out."
                    raise invalid(message, place, "unsupported_parameter")
            elif name not in cls.model_fields and len(ignored) < MAX_IGNORED:
                ignored.add(within + name[:64])

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema with ``null`` for every field that has a default."""
        json_schema = handler(schema)
        resolved = handler.resolve_ref_schema(json_schema)
        properties = resolved.get("properties", {})
        for name in properties.keys() - set(resolved.get("required", ())):
            properties[name] = _or_null(properties[name])
        return json_schema


class ResponseModel(BaseModel):
    """The documentation of a response, which is written as a dict so that its long parts can be
    encoded in pieces. Built on demand, for /openapi.json."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class DocumentedAs:
    """Documents a field that pydantic does not check as one of the type ``kind``."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(TypeAdapter(self._kind).core_schema)


def _or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    about = {name: field.pop(name) for name in ("title", "default", "description") if name in field}
    if not field or {"type": "null"} in field.get("anyOf", ()):
        return field | about
    kinds = field["anyOf"] if field.keys() == {"anyOf"} else [field]
    return {"anyOf": [*kinds, {"type": "null"}]} | about
