"""The page at /docs: /openapi.json as plain HTML, without scripts or other resources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

Json = dict[str, Any]

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Tandem: API</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
details { border: 1px solid #8886; border-radius: .4rem; margin: .4rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } code { font: .9em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } td, th { border-top: 1px solid #8884;
text-align: left; padding: .2rem .6rem .2rem 0; vertical-align: top; overflow-wrap: anywhere; }
</style></head><body>"""


def documentation_page(document: Json) -> str:
    """The page of an OpenAPI document."""
    return "".join(_page(document))


def _page(document: Json) -> Iterator[str]:
    info = document["info"]
    yield f"{HEAD}<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
    yield '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = operation.get("tags", ["other"])[0]
            by_tag.setdefault(tag, []).append(_operation(document, path, method, operation))
    for tag, operations in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(operations)}"
    schemas = document["components"]["schemas"]
    yield "<h2>Schemas</h2>"
    for name in sorted(schemas):
        yield _schema(name, schemas[name])
    yield "</body></html>"


def _operation(document: Json, path: str, method: str, operation: Json) -> str:
    key = " (needs a key)" if operation.get("security") else ""
    parts = [f"<p>{escape(operation.get('description', ''))}{key}</p>"]
    body = operation.get("requestBody")
    if body:
        parts.append(f"<p>Body: {_content(body['content'])}</p>")
    for status, response in operation["responses"].items():
        parts.append(f"<p>{escape(status)}: {_content(response.get('content', {}))}</p>")
    head = f"<summary><code>{method.upper()} {escape(path)}</code></summary>"
    return f"<details>{head}{''.join(parts)}</details>"


def _content(content: Json) -> str:
    kinds = [f"{_kind(of.get('schema', {}))} as {escape(kind)}" for kind, of in content.items()]
    return ", ".join(kinds) or "no body"


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}</td>"
        f"<td>{_kind(about)}</td><td>{_limits(about)}</td></tr>"
        for field, about in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", "")).replace("\n", " ")
    table = f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>" if rows else ""
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<p>{about}</p>{table}</details>"
    )


def _kind(schema: Json) -> str:
    """The type of a value in a few words, with links to schemas."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_kind(part) for part in schema[union]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return escape(" or ".join(json.dumps(value) for value in values))
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any value")))


def _limits(schema: Json) -> str:
    """The description of a field, its default and its bounds."""
    parts = [schema.get("description", "")]
    if schema.get("default") is not None:
        parts.append(f"default {json.dumps(schema['default'])}")
    for part in (schema, *schema.get("anyOf", ())):
        parts += [
            f"{word} {part[name]}"
            for name, word in (
                ("minimum", "at least"),
                ("exclusiveMinimum", "above"),
                ("maximum", "at most"),
                ("maxLength", "characters at most"),
            )
            if name in part
        ]
    return escape("; ".join(filter(None, parts)))
