"""Request bodies as pydantic models, with OpenAI's messages for what is wrong in them.

Checks that need the model, such as of token ids, and those of long arrays, such as prompts, are
made by hand: pydantic would hold the GIL for as long as an array takes.
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

# Unknown fields of one request that are recorded; clients repeat the same ones.
MAX_IGNORED = 16
# The first integers that the signed types of protobuf cannot hold.
INT32, INT64 = 2**31, 2**63
_LARGEST = int(sys.float_info.max)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bounded(value: Any) -> Any:
    too_large = type(value) is int and abs(value) > _LARGEST
    return sys.float_info.max * (1 if value > 0 else -1) if too_large else value


def _named_boolean(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


# vLLM takes the names of booleans too.
NAMED_BOOLEAN = BeforeValidator(_named_boolean)
# Some clients write 100.0 for an integer, which vLLM accepts too.
WHOLE = BeforeValidator(_whole)
# JSON's integers have no limit, and those that no double can hold are out of range, not no numbers.
BOUNDED = BeforeValidator(_bounded)


class BodyModel(BaseModel):
    """A JSON object of a request. ``null`` stands for the default, as in OpenAI's API.

    Fields are checked in the order of their declaration, and the first wrong one is reported.
    ``unsupported`` has the names of features that are not implemented, with the values that have no
    effect; other values are rejected. Unknown names are ignored, as in vLLM.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, body: Any, ignored: set[str], within: str = "", *, at: str = "") -> Self:
        """Check an object, which errors place at ``at``. Its unknown names are added to
        ``ignored``, with the prefix ``within``. Raises ``RequestError``."""
        if not isinstance(body, dict):
            if at:
                raise wrong_type(at, "an object", body)
            raise invalid("The request body must be a JSON object.")
        given = {name: value for name, value in body.items() if value is not None}
        if not given.keys() <= cls.__pydantic_fields__.keys():
            cls._check_names(given, ignored, within, at)
        try:
            # model_validate does the same in half as much time again, for each message of a chat.
            checked: Self = cls.__pydantic_validator__.validate_python(given)
            return checked
        except ValidationError as error:
            raise to_request_error(error, given, at) from None

    @classmethod
    def _check_names(cls, given: dict[str, Any], ignored: set[str], within: str, at: str) -> None:
        for name, value in given.items():
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
        made = handler(schema)
        resolved = handler.resolve_ref_schema(made)
        properties = resolved.get("properties", {})
        for name in properties.keys() - set(resolved.get("required", ())):
            properties[name] = _or_null(properties[name])
        return made


class ResponseModel(BaseModel):
    """The documentation of an answer, which is written as a dict: its long parts are encoded in
    pieces. Built when /openapi.json is asked for."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class DocumentedAs:
    """The documentation of a field that is checked by hand, as one of the type ``kind``."""

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
