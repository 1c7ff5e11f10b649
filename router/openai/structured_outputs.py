"""Constraints on the output: ``response_format``, ``structured_outputs``, and the older names of
vLLM and llama.cpp.

Their shape is checked here. The decode node compiles them before it admits the request, and its
errors name the client's field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ...proto import tandem_pb2 as pb
from ...shared.text.reasoning import NO_PARSER, PARSERS
from ..errors import invalid
from ..requests.body_errors import too_long, wrong_type
from ..requests.body_model import DocumentedAs
from ..requests.json_size import fits
from ..requests.sampling import SamplingBody

# The limit of grammars that a node compiles.
MAX_CHARACTERS = 128 * 1024
MAX_CHOICES = 16384
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


class JsonSchemaFormat(BaseModel):
    """A schema. The output always follows it, whether ``strict`` or not."""

    name: Annotated[str, Field(pattern=f"^{_NAME.pattern}$")] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``. A structural tag has ``structures`` and ``triggers``, or
    ``format``; a ``schema`` beside ``json_object`` is llama.cpp's form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputsObject(BaseModel):
    """vLLM's ``structured_outputs``: exactly one constraint."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False


Schema = str | dict[str, Any]
ResponseFormatField = Annotated[dict[str, Any], DocumentedAs(ResponseFormat)]
StructuredOutputsField = Annotated[dict[str, Any], DocumentedAs(StructuredOutputsObject)]
_UNSUPPORTED = {"disable_additional_properties": (False,), "whitespace_pattern": ()}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Fields that are a constraint each: vLLM's older names, and llama.cpp's.
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


class ConstrainedBody(SamplingBody):
    """The fields of chat and text completions that constrain the output."""

    response_format: ResponseFormatField | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: Annotated[Any, DocumentedAs(Schema)] = None
    guided_regex: Annotated[Any, DocumentedAs(str)] = None
    guided_choice: Annotated[Any, DocumentedAs(list[str])] = None
    guided_grammar: Annotated[Any, DocumentedAs(str)] = None
    json_schema: Annotated[Any, DocumentedAs(Schema)] = None
    grammar: Annotated[Any, DocumentedAs(str)] = None


def read_constraint(body: ConstrainedBody, ignored: set[str]) -> pb.StructuredOutputs | None:
    """The constraint of a request, if it has one. Raises ``RequestError``."""
    constraints = []
    if body.response_format is not None:
        constraints.append(_response_format(body.response_format, ignored))
    if body.structured_outputs is not None:
        constraints.append(_structured_outputs(body.structured_outputs, ignored))
    for name, kind in _FIELDS.items():
        value = getattr(body, name)
        # llama.cpp's clients send an empty grammar for no constraint.
        if value is not None and (name, value) != ("grammar", ""):
            constraints.append(constraint(kind, value, name))
    present = [each for each in constraints if each is not None]
    if len(present) > 1:
        first, second = present[0].param, present[1].param
        message = f"'{first}' and '{second}' both constrain the output; set one of them."
        raise invalid(message, second, "invalid_value")
    return present[0] if present else None


def constraint(kind: str, value: Any, param: str) -> pb.StructuredOutputs:
    """A constraint of one kind; errors name ``param``. Raises ``RequestError``."""
    outputs = pb.StructuredOutputs(param=param)
    if kind == "json_object":
        outputs.json_object = True
    elif kind == "choice":
        outputs.choice.texts.extend(_choices(value, param))
    else:
        setattr(outputs, kind, _TEXTS[kind](value, param))
    return outputs


def follow_reasoning(sampling: pb.Sampling, parser: str, opened: bool | None = None) -> None:
    """Apply the constraint after the reasoning that the router's parser separates. ``opened`` says
    whether the prompt ends inside the reasoning; ``None`` if unknown."""
    if parser == NO_PARSER or not sampling.HasField("structured_outputs"):
        return
    if parser not in PARSERS:
        if sampling.structured_outputs.tool_calls:  # their grammar includes the channels
            return
        param = sampling.structured_outputs.param
        message = f"'{param}' is not supported for models that write channels (gpt-oss)."
        raise invalid(message, param, "unsupported_parameter")
    markers = PARSERS[parser]
    if opened is not False:
        sampling.structured_outputs.reasoning_end = markers.end
        is_open = markers.opened if opened is None else opened
        sampling.structured_outputs.reasoning_start = "" if is_open else markers.start


def _response_format(
    response_format: dict[str, Any], ignored: set[str]
) -> pb.StructuredOutputs | None:
    match kind := response_format.get("type"):
        case "text":
            return None
        case "json_object":
            if (schema := response_format.get("schema")) is None:
                return constraint("json_object", True, "response_format")
            return constraint("json", _object(schema, "response_format.schema"), "response_format")
        case "json_schema":
            return constraint("json", _schema_of(response_format), "response_format")
        case "structural_tag":
            return constraint("structural_tag", response_format, "response_format")
    raise invalid(
        f"Invalid value for 'response_format.type': {kind!r:.64}; it must be one of "
        f"{', '.join(FORMATS)}.",
        "response_format.type",
        "invalid_value",
    )


def _schema_of(response_format: dict[str, Any]) -> Any:
    param = "response_format.json_schema"
    json_schema = response_format.get("json_schema")
    if json_schema is None:
        message = f"Missing required parameter: '{param}'."
        raise invalid(message, param, "missing_required_parameter")
    if not isinstance(json_schema, dict):
        raise wrong_type(param, "an object", json_schema)
    if json_schema.get("schema") is None:
        message = f"Missing required parameter: '{param}.schema'."
        raise invalid(message, f"{param}.schema", "missing_required_parameter")
    if (name := json_schema.get("name")) is not None:
        _check_name(name, f"{param}.name")
    return _object(json_schema["schema"], f"{param}.schema")


def _check_name(name: Any, param: str) -> None:
    """Raise ``RequestError`` for a name that OpenAI rejects. llama.cpp's clients send no name."""
    if not isinstance(name, str):
        raise wrong_type(param, "a string", name)
    if not _NAME.fullmatch(name):
        message = f"Invalid '{param}': it must have 1 to 64 letters, digits, _ and -."
        raise invalid(message, param, "invalid_value")


def _structured_outputs(fields: dict[str, Any], ignored: set[str]) -> pb.StructuredOutputs | None:
    for name, value in fields.items():
        if name in _UNSUPPORTED and value is not None and value not in _UNSUPPORTED[name]:
            param = f"structured_outputs.{name}"
            message = f"'{param}' is not supported by this server; leave it out."
            raise invalid(message, param, "unsupported_parameter")
        if name not in (*_KINDS, *_UNSUPPORTED, "disable_any_whitespace"):
            ignored.add(f"structured_outputs.{name[:64]}")
    for name in ("json_object", "disable_any_whitespace"):
        if not isinstance(fields.get(name) or False, bool):
            raise wrong_type(f"structured_outputs.{name}", "a boolean", fields[name])
    kinds = [kind for kind in _KINDS if fields.get(kind) not in (None, False)]
    if len(kinds) != 1:
        names = " and ".join(kinds) or "none"
        raise invalid(
            f"Invalid 'structured_outputs': exactly one of {', '.join(_KINDS)} is needed, and "
            f"{names} is given.",
            "structured_outputs",
            "invalid_value",
        )
    outputs = constraint(kinds[0], fields[kinds[0]], f"structured_outputs.{kinds[0]}")
    outputs.compact = bool(fields.get("disable_any_whitespace"))
    return outputs


def _choices(value: Any, param: str) -> list[str]:
    if not isinstance(value, list):
        raise wrong_type(param, "an array", value)
    if not value:
        raise invalid(f"Invalid '{param}': empty array.", param, "empty_array")
    if len(value) > MAX_CHOICES:
        raise too_long(param, value, MAX_CHOICES)
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise wrong_type(f"{param}[{i}]", "a string", text)
    return [_unicode(text, param) for text in value]


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    if not value:
        raise invalid(f"Invalid '{param}': empty string.", param, "empty_string")
    if len(value) > MAX_CHARACTERS:
        raise too_long(param, value, MAX_CHARACTERS)
    return _unicode(value, param)


def _unicode(text: str, param: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise invalid(f"Invalid '{param}': it has half of a surrogate pair.", param)
    return text


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def _json(value: Any, param: str) -> str:
    """A schema or a tag as JSON; clients send an object or its text."""
    if isinstance(value, str):
        return _text(value, param)
    if not fits(_object(value, param), MAX_CHARACTERS):
        message = f"Invalid '{param}': it has more than {MAX_CHARACTERS} characters and values."
        raise invalid(message, param, "too_large")
    return _text(json.dumps(value), param)


_TEXTS: dict[str, Callable[[Any, str], str]] = {
    "json": _json,
    "structural_tag": _json,
    "tool_calls": _json,
    "regex": _text,
    "grammar": _text,
}
