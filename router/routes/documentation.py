"""The part of /openapi.json about bodies and responses that FastAPI does not handle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

SCHEMA = "#/components/schemas/{model}"


def documented(
    body: Any,
    response: Any,
    events: Any = None,
    *,
    last: str | None = None,
    lines: Any = None,
    optional: bool = False,
) -> dict[str, Any]:
    """The arguments of a route that document its body, which may be ``optional``, its response, and
    the data of streamed events or streamed lines. Each is a model or a union; pass all models to
    ``components`` too. ``last`` is the data of a last event that is not JSON."""
    content = {"application/json": {"schema": _reference(response)}}
    if events is not None:
        content |= event_stream(events, last)
    if lines is not None:
        content["application/x-ndjson"] = {"schema": _reference(lines)}
    body_content = {"application/json": {"schema": _reference(body)}}
    return {
        "openapi_extra": {"requestBody": {"required": not optional, "content": body_content}},
        "responses": {200: {"content": content}},
    }


def event_stream(events: Any, last: str | None = None) -> dict[str, Any]:
    """The content of a response of server-sent events. In OpenAPI 3.1 its schema describes the
    fields of one event."""
    json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _reference(events),
    }
    data = json if last is None else {"anyOf": [{"const": last}, json]}
    fields = {"event": {"type": "string"}, "data": data}
    return {
        "text/event-stream": {
            "schema": {"type": "object", "required": ["data"], "properties": fields}
        }
    }


def documented_errors(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of an ``APIRouter`` whose errors have this body."""
    content = {"application/json": {"schema": _reference(body)}}
    return {"default": {"description": "An error", "content": content}}


def components(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The schemas of models, by name."""
    _, result = models_json_schema([(model, "validation") for model in models], ref_template=SCHEMA)
    schemas: dict[str, Any] = result["$defs"]
    return schemas


def _reference(kind: Any) -> dict[str, Any]:
    references = [{"$ref": SCHEMA.format(model=m.__name__)} for m in get_args(kind) or (kind,)]
    return references[0] if len(references) == 1 else {"anyOf": references}
