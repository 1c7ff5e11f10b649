"""JSON schemas in the form that llguidance follows.

llguidance rejects keywords that it does not implement, even where they have no effect, and computes
with doubles, so that large integers would be rounded. Keywords without effect are left out here,
and numbers that it could not follow exactly are rejected, some of which would crash the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

Schema = Mapping[str, Any]

# Implemented string formats; others are annotations.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
_ONE = frozenset(
    """additionalItems additionalProperties contains else if items not propertyNames then
    unevaluatedItems unevaluatedProperties""".split()  # noqa: SIM905
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
_MAX_KEYWORDS = frozenset(("maxContains", "maxItems", "maxLength", "maxProperties"))
_COUNTS = _MAX_KEYWORDS | {"minContains", "minItems", "minLength", "minProperties"}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OTHERS = frozenset(
    """$anchor $dynamicAnchor $dynamicRef $id $recursiveRef $ref $schema const dependentRequired
    enum format id multipleOf pattern required type uniqueItems x-guidance""".split()  # noqa: SIM905
)
# Anything else is an annotation, or no keyword at all.
KEYWORDS = _ONE | _LISTS | _NAMED | _COUNTS | {*_LOWER, *_UPPER} | _OTHERS
# Keywords that llguidance does not implement, by the type that they constrain.
_UNIMPLEMENTED_BY_TYPE = {
    "array": ("contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"),
    "object": (
        *("dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        "unevaluatedProperties",
    ),
}
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_OLDEST = re.compile(r"https?://json-schema\.org/draft-0[1-3]/")

# Every integer up to here is a double.
MAX_EXACT = 2**53
# The largest double below 2^63: integers up to it are exact. Bounds of other numbers are written
# with the fewest digits that identify the double.
MAX_INTEGER, MAX_BOUND = 2**63 - 1024, 10**18
_STEP = 1024  # distance of doubles at ``MAX_INTEGER``, more than at ``MAX_BOUND``


class SchemaError(ValueError):
    """The schema has a number that cannot be followed, or an unsupported draft."""


def clean_schema(schema: Any) -> Any:
    """Drop the keywords that have no effect. Raises ``SchemaError``."""
    cleaner = _Cleaner(schema)
    result = cleaner.clean(schema)
    if isinstance(result, dict) and str(result.get("$id", "")).startswith("#"):
        del result["$id"]  # an anchor of the root, which the compiler would try to resolve
    return result


def _reference_parts(value: Any) -> Iterator[str]:
    """The parts of all references, which may lead through unknown keywords."""
    if isinstance(value, Mapping):
        if isinstance(reference := value.get("$ref"), str):
            yield from reference.split("/")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _reference_parts(item)


class _Cleaner:
    """Cleans one schema and its subschemas."""

    def __init__(self, whole: Any) -> None:
        self._keywords = KEYWORDS.union(_reference_parts(whole))
        draft = whole.get("$schema") if isinstance(whole, Mapping) else None
        match = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
        self._has_anchors = match is None or match[1].startswith("draft/")

    def clean(self, schema: Any) -> Any:
        """Clean a schema, a boolean or an object. The compiler rejects values of the wrong type."""
        if not isinstance(schema, Mapping):
            return schema
        result = {
            name: self._value(name, value)
            for name, value in schema.items()
            if name in self._keywords
        }
        _set_draft(result)
        self._set_anchors(result)
        _drop_without_effect(result)
        _check_values(result)
        _follow_bounds(result, _LOWER, -1, max)
        _follow_bounds(result, _UPPER, 1, min)
        return result

    def _value(self, name: str, value: Any) -> Any:
        if name in _NAMED and isinstance(value, Mapping):
            return {key: self.clean(item) for key, item in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [self.clean(item) for item in value]
        return self.clean(value) if name in _ONE or name not in KEYWORDS else value

    def _set_anchors(self, schema: dict[str, Any]) -> None:
        """Turn dynamic anchors, and ids that are fragments, into plain anchors."""
        if (anchor := schema.pop("$dynamicAnchor", None)) is not None:
            schema.setdefault("$anchor", anchor)
        id_ = schema.get("$id")
        if self._has_anchors and isinstance(id_, str) and id_.startswith("#"):
            schema.setdefault("$anchor", schema.pop("$id")[1:])


def _set_draft(schema: dict[str, Any]) -> None:
    """Write the draft as the address that the compiler knows; leave out any other dialect."""
    draft = schema.get("$schema")
    if isinstance(draft, str) and _OLDEST.match(draft):
        raise SchemaError(f"'$schema' is {draft!r:.80}; drafts before 4 are not supported")
    match = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
    if match is None:
        schema.pop("$schema", None)
    else:
        scheme = "https" if match[1].startswith("draft/") else "http"
        schema["$schema"] = f"{scheme}://json-schema.org/{match[1]}/schema"


def _drop_without_effect(schema: dict[str, Any]) -> None:
    """Leave out unimplemented keywords where they have no effect."""
    form = schema.get("format")
    if not isinstance(form, str) or form not in FORMATS:
        _drop(schema, "format")
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    for kind, names in _UNIMPLEMENTED_BY_TYPE.items():
        if None not in types and kind not in types:
            _drop(schema, *names)
    if "contains" not in schema:
        _drop(schema, "minContains", "maxContains")
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        _drop(schema, "contains", "minContains")
    max_items = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (
        isinstance(max_items, (int, float)) and max_items <= 1
    ):
        _drop(schema, "uniqueItems")
    for name in ("unevaluatedItems", "unevaluatedProperties"):
        if name in schema and _takes_anything(schema[name]):
            _drop(schema, name)
    if "propertyNames" in schema and _takes_any_text(schema["propertyNames"]):
        _drop(schema, "propertyNames")
    if schema.get("not") is False:
        _drop(schema, "not")
    # Without a condition, or without consequences.
    if "if" not in schema or all(
        _takes_anything(schema.get(name, True)) for name in ("then", "else")
    ):
        _drop(schema, "if", "then", "else")
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        _drop_empty_dependencies(schema, name)
    for name in _COUNTS & schema.keys():
        count = schema[name]
        if isinstance(count, float) and count.is_integer():
            schema[name] = int(count)
        if name in _MAX_KEYWORDS and _is_large(count):
            _drop(schema, name)


def _drop(schema: dict[str, Any], *names: str) -> None:
    for name in names:
        schema.pop(name, None)


def _takes_anything(schema: Any) -> bool:
    return schema is True or schema == {}


def _takes_any_text(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.keys() - {"type"}:
        return schema is True
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def _drop_empty_dependencies(schema: dict[str, Any], name: str) -> None:
    """Leave out dependencies without effect, or on properties that are required anyway."""
    dependencies, required = schema.get(name), schema.get("required", ())
    if not isinstance(dependencies, dict) or not isinstance(required, (list, tuple)):
        return
    schema[name] = {
        key: value
        for key, value in dependencies.items()
        if not (
            all(item in required for item in value)
            if isinstance(value, list)
            else _takes_anything(value)
        )
    }
    if not schema[name]:
        del schema[name]


def _check_values(schema: dict[str, Any]) -> None:
    """Raise ``SchemaError`` for numbers that would be rounded."""
    for name in ("const", "enum", "multipleOf"):
        for number in _numbers(schema.get(name)):
            if name == "multipleOf" or not _is_exact(number):
                raise _inexact(name, number)


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value that may not be exact as doubles."""
    if isinstance(value, (int, float)):
        if abs(value) > MAX_EXACT:
            yield value
    elif isinstance(value, (list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def _is_exact(number: int | float) -> bool:
    """True if a number is written with all of its digits."""
    whole = int(number)
    return _is_double(whole) if abs(whole) <= MAX_INTEGER else _is_shortest(whole)


def _is_double(number: int) -> bool:
    return int(float(number)) == number


def _is_shortest(number: int) -> bool:
    """True if the shortest digits of the nearest double are those of the number. Not for the double
    2^63, with which the compiler fails."""
    if number.bit_length() > 1023 or abs(float(number)) == 2**63:
        return False
    return Decimal(repr(float(number))) == number


def _follow_bounds(
    schema: dict[str, Any],
    names: tuple[str, str],
    outwards: int,
    tighter: Callable[[int, int], int],
) -> None:
    """Replace a bound beyond ``MAX_EXACT`` by one that is followed exactly: the same, or a slightly
    tighter one that is still far out. Raises ``SchemaError`` if it allows only values that are far
    out. ``outwards`` is the sign of the bound's direction."""
    including, excluding = names
    bounds = {name: schema[name] for name in names if name in schema}
    if bounds.get(excluding) is True:  # as in draft 4
        bounds = {excluding: bounds.get(including)}
    if not any(_is_large(value) for value in bounds.values()):
        return
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    is_integer = "integer" in types and "number" not in types
    edges: list[int] = []
    for name, value in bounds.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        edge = value if isinstance(value, int) else math.floor(value * outwards) * outwards
        if name == excluding and edge == value:
            edge -= outwards
        edges.append(_exact_bound(name, value, edge, outwards, is_integer=is_integer))
    _drop(schema, *names)
    schema[including] = edges[0] if len(edges) == 1 else tighter(*edges)


def _is_large(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) >= MAX_EXACT


def _exact_bound(
    name: str, value: int | float, edge: int, outwards: int, *, is_integer: bool
) -> int:
    limit = MAX_INTEGER if is_integer else MAX_BOUND
    exact = _is_double if is_integer else _is_shortest
    if abs(edge) <= MAX_EXACT or (abs(edge) <= limit and exact(edge)):
        return edge
    if edge * outwards < 0:
        raise _inexact(name, value)
    step = _STEP if is_integer else 1000
    return outwards * (min(abs(edge), limit) // step * step)


def _inexact(name: str, number: int | float) -> SchemaError:
    digits = str(number)
    text = digits if len(digits) <= 40 else f"{digits[:40]}..."
    return SchemaError(
        f"'{name}' has the number {text}, which is beyond 2^53 and cannot be followed to the digit"
    )
