"""JSON schemas in the form that llguidance follows.

It refuses what it does not implement, even where that asks for nothing, and computes with doubles:
of larger integers it would write others. What has no effect is left out here, and numbers that it
could not keep to are refused, some of which would end the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

Schema = Mapping[str, Any]

# Formats of texts that are followed; others are annotations.
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
_MOST = frozenset(("maxContains", "maxItems", "maxLength", "maxProperties"))
_COUNTS = _MOST | {"minContains", "minItems", "minLength", "minProperties"}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OTHERS = frozenset(
    """$anchor $dynamicAnchor $dynamicRef $id $recursiveRef $ref $schema const dependentRequired
    enum format id multipleOf pattern required type uniqueItems x-guidance""".split()  # noqa: SIM905
)
# Anything else is an annotation, or no keyword at all.
KEYWORDS = _ONE | _LISTS | _NAMED | _COUNTS | {*_LOWER, *_UPPER} | _OTHERS
# Keywords that llguidance does not implement, by the only type of which they say something.
_OF_TYPE = {
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
# The largest double that is below 2^63, within which integers are followed to the digit. Bounds of
# other numbers are written with as few digits as tell doubles apart.
MAX_INTEGER, MAX_BOUND = 2**63 - 1024, 10**18
_STEP = 1024  # of doubles next to ``MAX_INTEGER``, and more than those next to ``MAX_BOUND``


class SchemaError(ValueError):
    """The schema has a number that could not be kept to."""


def followable(schema: Any) -> Any:
    """The schema without what has no effect. Raises ``SchemaError``."""
    cleaner = _Cleaner(schema)
    made = cleaner.clean(schema)
    if isinstance(made, dict) and str(made.get("$id", "")).startswith("#"):
        del made["$id"]  # an anchor of the whole, which the compiler would look for
    return made


def _referenced(value: Any) -> Iterator[str]:
    """The parts of all references, which may lead to places that are no keywords."""
    if isinstance(value, Mapping):
        if isinstance(reference := value.get("$ref"), str):
            yield from reference.split("/")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _referenced(item)


class _Cleaner:
    """Cleans one schema and those in it."""

    def __init__(self, whole: Any) -> None:
        self._kept = KEYWORDS.union(_referenced(whole))
        draft = whole.get("$schema") if isinstance(whole, Mapping) else None
        found = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
        self._has_anchors = found is None or found[1].startswith("draft/")

    def clean(self, schema: Any) -> Any:
        """A schema: a boolean, or an object. Values of the wrong type stay for the compiler."""
        if not isinstance(schema, Mapping):
            return schema
        made = {
            name: self._value(name, value) for name, value in schema.items() if name in self._kept
        }
        _with_known_draft(made)
        self._with_anchors(made)
        _without_effect(made)
        _check_values(made)
        _follow_bounds(made, _LOWER, -1, max)
        _follow_bounds(made, _UPPER, 1, min)
        return made

    def _value(self, name: str, value: Any) -> Any:
        if name in _NAMED and isinstance(value, Mapping):
            return {key: self.clean(item) for key, item in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [self.clean(item) for item in value]
        return self.clean(value) if name in _ONE or name not in KEYWORDS else value

    def _with_anchors(self, made: dict[str, Any]) -> None:
        """Plain anchors in the place of dynamic ones, and of ids that are fragments."""
        if (anchor := made.pop("$dynamicAnchor", None)) is not None:
            made.setdefault("$anchor", anchor)
        named = made.get("$id")
        if self._has_anchors and isinstance(named, str) and named.startswith("#"):
            made.setdefault("$anchor", made.pop("$id")[1:])


def _with_known_draft(made: dict[str, Any]) -> None:
    """The draft by the address that the compiler knows; that of any other dialect is left out."""
    draft = made.get("$schema")
    if isinstance(draft, str) and _OLDEST.match(draft):
        raise SchemaError(f"'$schema' is {draft!r:.80}; drafts before 4 are not supported")
    found = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
    if found is None:
        made.pop("$schema", None)
    else:
        scheme = "https" if found[1].startswith("draft/") else "http"
        made["$schema"] = f"{scheme}://json-schema.org/{found[1]}/schema"


def _without_effect(made: dict[str, Any]) -> None:
    """Leave out keywords that are not implemented where they ask for nothing."""
    form = made.get("format")
    if not isinstance(form, str) or form not in FORMATS:
        _drop(made, "format")
    types = made.get("type")
    types = types if isinstance(types, list) else [types]
    for kind, names in _OF_TYPE.items():
        if None not in types and kind not in types:
            _drop(made, *names)
    if "contains" not in made:
        _drop(made, "minContains", "maxContains")
    elif made.get("minContains") == 0 and "maxContains" not in made:
        _drop(made, "contains", "minContains")
    most = made.get("maxItems")
    if made.get("uniqueItems") is False or (isinstance(most, (int, float)) and most <= 1):
        _drop(made, "uniqueItems")
    for name in ("unevaluatedItems", "unevaluatedProperties"):
        if name in made and _takes_anything(made[name]):
            _drop(made, name)
    if "propertyNames" in made and _takes_any_text(made["propertyNames"]):
        _drop(made, "propertyNames")
    if made.get("not") is False:
        _drop(made, "not")
    # Without a condition, or without what it leads to.
    if "if" not in made or all(_takes_anything(made.get(name, True)) for name in ("then", "else")):
        _drop(made, "if", "then", "else")
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        _without_empty_dependencies(made, name)
    for name in _COUNTS & made.keys():
        count = made[name]
        if isinstance(count, float) and count.is_integer():
            made[name] = int(count)
        if name in _MOST and _is_large(count):
            _drop(made, name)


def _drop(made: dict[str, Any], *names: str) -> None:
    for name in names:
        made.pop(name, None)


def _takes_anything(schema: Any) -> bool:
    return schema is True or schema == {}


def _takes_any_text(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.keys() - {"type"}:
        return schema is True
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def _without_empty_dependencies(made: dict[str, Any], name: str) -> None:
    """Properties that ask for nothing, or for what is required anyway."""
    given, required = made.get(name), made.get("required", ())
    if not isinstance(given, dict) or not isinstance(required, (list, tuple)):
        return
    made[name] = {
        key: value
        for key, value in given.items()
        if not (
            all(item in required for item in value)
            if isinstance(value, list)
            else _takes_anything(value)
        )
    }
    if not made[name]:
        del made[name]


def _check_values(made: dict[str, Any]) -> None:
    """Raise ``SchemaError`` for numbers that would be written as others."""
    for name in ("const", "enum", "multipleOf"):
        for number in _numbers(made.get(name)):
            if name == "multipleOf" or not _is_written(number):
                raise _unfollowable(name, number)


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value that are beyond those that every double tells apart."""
    if isinstance(value, (int, float)):
        if abs(value) > MAX_EXACT:
            yield value
    elif isinstance(value, (list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def _is_written(number: int | float) -> bool:
    """True if a number is written with its own digits."""
    whole = int(number)
    return _is_double(whole) if abs(whole) <= MAX_INTEGER else _is_shortest(whole)


def _is_double(number: int) -> bool:
    return int(float(number)) == number


def _is_shortest(number: int) -> bool:
    """True if the shortest digits that mean the nearest double are those of the number. The double
    2^63 is none of them: the compiler fails with it."""
    if number.bit_length() > 1023 or abs(float(number)) == 2**63:
        return False
    return Decimal(repr(float(number))) == number


def _follow_bounds(
    made: dict[str, Any],
    names: tuple[str, str],
    outwards: int,
    tighter: Callable[[int, int], int],
) -> None:
    """Write a bound beyond ``MAX_EXACT`` as one that is followed to the digit: the same, or a
    slightly tighter one that is still far away. Raises ``SchemaError`` if it leaves only values
    that are far away. ``outwards`` is the sign of the direction that the bound is in."""
    including, excluding = names
    bounds = {name: made[name] for name in names if name in made}
    if bounds.get(excluding) is True:  # as in draft 4
        bounds = {excluding: bounds.get(including)}
    if not any(_is_large(value) for value in bounds.values()):
        return
    types = made.get("type")
    types = types if isinstance(types, list) else [types]
    is_integer = "integer" in types and "number" not in types
    found: list[int] = []
    for name, value in bounds.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        edge = value if isinstance(value, int) else math.floor(value * outwards) * outwards
        if name == excluding and edge == value:
            edge -= outwards
        found.append(_followed(name, value, edge, outwards, is_integer=is_integer))
    _drop(made, *names)
    made[including] = found[0] if len(found) == 1 else tighter(*found)


def _is_large(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) >= MAX_EXACT


def _followed(name: str, given: int | float, edge: int, outwards: int, *, is_integer: bool) -> int:
    most = MAX_INTEGER if is_integer else MAX_BOUND
    exact = _is_double if is_integer else _is_shortest
    if abs(edge) <= MAX_EXACT or (abs(edge) <= most and exact(edge)):
        return edge
    if edge * outwards < 0:
        raise _unfollowable(name, given)
    step = _STEP if is_integer else 1000
    return outwards * (min(abs(edge), most) // step * step)


def _unfollowable(name: str, number: int | float) -> SchemaError:
    digits = str(number)
    shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
    return SchemaError(
        f"'{name}' has the number {shown}, which is beyond 2^53 and cannot be followed to the digit"
    )
