"""Which parts of a JSON schema outputs are not held to: xgrammar reads them and does nothing, or
reads one keyword and leaves out those beside it (0.2.8, each tried in tests/cpu/test_schemas.py).

What is narrower than the schema (only properties that are named, a pattern as a whole) is no lapse.

    unenforced({"type": "array", "uniqueItems": True})      # [Unenforced("uniqueItems", "#")]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Each stands for a whole schema, and those earlier in the list are read alone.
LEADING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
NEVER = frozenset((
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "minContains", "maxContains", "$dynamicRef", "$recursiveRef", "additionalItems",
))  # fmt: skip
OF_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        (
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
            "patternProperties",
            "propertyNames",
            "unevaluatedProperties",
        )
    ),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    ),
}
TYPED: frozenset[str] = frozenset().union(*OF_TYPE.values())
RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# A schema without a type is read as one of the type that these belong to.
TELLING = {"properties": "object", "additionalProperties": "object", "items": "array"}
TELLING |= {"prefixItems": "array"}
FORMATS = frozenset((
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
))  # fmt: skip
# Lookarounds are left out of a pattern, and so is an anchor that is not at its end.
LEFT_OUT = re.compile(r"\(\?<?[=!]|(?<!^)(?<!\\)(?<!\[)\^|(?<!\\)\$(?!$)")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SCHEMAS = (
    "items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
)  # fmt: skip
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


class Unenforced(NamedTuple):
    keyword: str
    path: str  # of the schema that has it, from # on

    def __str__(self) -> str:
        return f"{self.keyword} at {self.path}"


def unenforced(schema: Any) -> list[Unenforced]:
    """All of them, from the outside inward, of a schema as JSON is read."""
    lapses: list[Unenforced] = []
    waiting: list[tuple[Any, str]] = [(schema, "#")]
    for each, path in waiting:  # which grows
        if isinstance(each, dict):
            keywords = dict.fromkeys(_unenforced_here(each, path == "#"))
            lapses += [Unenforced(keyword, path) for keyword in keywords]
            waiting += _parts(each, path)
    return lapses


def strict_message(lapses: Sequence[Unenforced]) -> str:
    """Why a schema cannot be kept strictly."""
    listed = ", ".join(str(lapse)[:200] for lapse in lapses[:5])
    more = f" and {len(lapses) - 5} more" if len(lapses) > 5 else ""
    return (
        f"strict is true, and these parts of the schema cannot be enforced: {listed}{more}; "
        "remove them, or set strict to false"
    )


def _parts(schema: Mapping[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    for keyword in SCHEMAS_BY_NAME:
        if isinstance(schema.get(keyword), dict):
            for name, part in schema[keyword].items():
                yield part, f"{path}/{keyword}/{_escaped(name)}"
    for keyword in SCHEMA_LISTS:
        if isinstance(schema.get(keyword), list):
            for index, part in enumerate(schema[keyword]):
                yield part, f"{path}/{keyword}/{index}"
    for keyword in SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            implied = {"type": "string"} if keyword == "propertyNames" else {}
            yield {**implied, **schema[keyword]}, f"{path}/{keyword}"


def _escaped(name: str) -> str:
    """As JSON pointers have it."""
    return name.replace("~", "~0").replace("/", "~1")


def _unenforced_here(schema: Mapping[str, Any], is_root: bool) -> Iterator[str]:
    yield from (keyword for keyword in schema if keyword in NEVER)
    if schema.get("uniqueItems"):
        yield "uniqueItems"
    if "$id" in schema and not is_root:
        yield "$id"
    leading = next((keyword for keyword in LEADING if keyword in schema), None)
    if leading is None:
        yield from _of_types(schema)
        return
    yield from _wrong_leading(schema, leading)
    yield from (
        keyword
        for keyword in schema
        if keyword != leading and (keyword in TYPED or keyword in LEADING)
    )
    if "type" in schema and not _fits_type(schema, leading):
        yield "type"


def _wrong_leading(schema: Mapping[str, Any], leading: str) -> Iterator[str]:
    value = schema[leading]
    if leading == "$ref" and not (value == "#" or str(value).startswith("#/")):
        yield "$ref"
    if leading == "allOf" and len(_list(value)) != 1:
        yield "allOf"
    if leading == "oneOf":
        parts = _list(value)
        pairs = ((a, b) for index, a in enumerate(parts) for b in parts[:index])
        if not all(_are_disjoint(first, second) for first, second in pairs):
            yield "oneOf"


def _fits_type(schema: Mapping[str, Any], leading: str) -> bool:
    """Whether what leads keeps to the `type` beside it by itself."""
    types, value = _types_of(schema), schema[leading]
    if leading in ("const", "enum"):
        values = [value] if leading == "const" else _list(value)
        return all(any(_is_of(each, kind) for kind in types) for each in values)
    if leading in ("anyOf", "oneOf"):
        return all(bool(_types_of(part)) and _types_of(part) <= types for part in _list(value))
    return False


def _of_types(schema: Mapping[str, Any]) -> Iterator[str]:
    types = _types_of(schema)
    if "type" not in schema:
        types = {TELLING[keyword] for keyword in TELLING if keyword in schema}
        kept: frozenset[str] = frozenset().union(*(OF_TYPE[kind] for kind in types))
        yield from (keyword for keyword in schema if keyword in TYPED - kept)
    if "object" in types:
        yield from _of_object(schema)
    if "string" in types:
        yield from _of_string(schema)
    if "multipleOf" in schema and types & {"integer", "number"}:
        is_whole = isinstance(schema["multipleOf"], int)
        if "number" in types or not is_whole or any(keyword in schema for keyword in RANGE):
            yield "multipleOf"


def _of_object(schema: Mapping[str, Any]) -> Iterator[str]:
    names, patterns = (_mapping(schema.get(each)) for each in ("properties", "patternProperties"))
    if any(name not in names for name in _texts(schema.get("required"))):
        yield "required"
    if patterns and (names or len(patterns) > 1):  # more than one may be about the same name
        yield "patternProperties"
    if "propertyNames" in schema and (names or patterns):
        yield "propertyNames"
    if any(LEFT_OUT.search(pattern) for pattern in patterns):
        yield "patternProperties"


def _of_string(schema: Mapping[str, Any]) -> Iterator[str]:
    pattern, format = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and LEFT_OUT.search(pattern):
        yield "pattern"
    if format is not None and not (isinstance(format, str) and format in FORMATS):
        yield "format"
    if format is not None and pattern is not None:
        yield "pattern"
    if format is not None or pattern is not None:
        yield from (keyword for keyword in ("minLength", "maxLength") if keyword in schema)


def _types_of(schema: Any) -> set[str]:
    given = _mapping(schema).get("type")
    return {given} if isinstance(given, str) else set(_texts(given))


def _list(value: Any) -> list[Any]:
    """What is no list is wrong, and refused by who compiles it."""
    return value if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    return [each for each in _list(value) if isinstance(each, str)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind in TYPES and isinstance(value, TYPES[kind])


def _are_disjoint(first: Any, second: Any) -> bool:
    """Whether it is plain that no value is allowed by both."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return False
    values = [_values_of(first), _values_of(second)]
    if values[0] is not None and values[1] is not None:
        return not any(value in values[1] for value in values[0])
    types = [_kinds(first), _kinds(second)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != [{"object"}, {"object"}]:
        return False
    shared = set(_texts(first.get("required"))) & set(_texts(second.get("required")))
    ours, theirs = (_mapping(each.get("properties")) for each in (first, second))
    return any(_are_disjoint(ours.get(name), theirs.get(name)) for name in shared)


def _values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """All that is allowed, where that is a list; booleans are no numbers."""
    if "const" in schema:
        return [(type(schema["const"]) is bool, schema["const"])]
    if isinstance(schema.get("enum"), list):
        return [(type(value) is bool, value) for value in schema["enum"]]
    return None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Types, numbers whole or not as one."""
    types = _types_of(schema)
    values = _values_of(schema)
    if not types and values is not None:
        types = {kind for _, value in values for kind in TYPES if _is_of(value, kind)}
    return {"number" if kind == "integer" else kind for kind in types}
