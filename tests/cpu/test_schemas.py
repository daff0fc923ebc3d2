"""Which parts of a JSON schema are enforced: what schema_keywords.py says of them, against xgrammar
itself and a validator. And how much a grammar may repeat.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ridgeline.engine import Grammar
from ridgeline.engine.grammars.compilers import GrammarVocabulary, compile_here
from ridgeline.engine.requests.repetitions import MAX_COUNT, MAX_REPETITIONS, most_repeated
from ridgeline.engine.requests.schema_keywords import LEADING, NEVER, OF_TYPE, unenforced
from ridgeline.errors import UsageError

INT, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": INT, "b": INT}}
HAS_A = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
DEFS = {"$defs": {"x": INT}}

# What is said to be unenforced, a schema, and JSON that it forbids and outputs may be.
LAPSES: list[tuple[str, Any, str]] = [
    ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}, "[1, 1]"),
    ("contains", {"type": "array", "items": INT, "contains": {"const": 5}}, "[1]"),
    (
        "maxContains",
        {"type": "array", "items": INT, "contains": {"const": 1}, "maxContains": 1},
        "[1, 1]",
    ),
    ("not", {"type": "integer", "not": {"const": 5}}, "5"),
    ("if", {**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}'),
    ("dependentRequired", {**AB, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    ("dependentSchemas", {**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}'),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}, "1"),
    ("oneOf", {"oneOf": [{"const": 1}, INT]}, "1"),
    ("allOf", {"allOf": [INT, {"minimum": 3}]}, "1"),
    ("allOf", {"allOf": [HAS_A, AB]}, "{}"),
    ("type", {"type": "integer", "allOf": [{"minimum": 3}]}, '"a"'),
    ("type", {"type": "string", "anyOf": [INT, TEXT]}, "1"),
    ("type", {"type": "integer", "enum": [1, "a"]}, '"a"'),
    ("minimum", {"anyOf": [INT, {"type": "null"}], "minimum": 3}, "1"),
    ("minimum", {"enum": [1, 5], "minimum": 2}, "1"),
    ("minimum", {**DEFS, "$ref": "#/$defs/x", "minimum": 3}, "1"),
    ("minimum", {"minimum": 2}, "1"),
    ("maxItems", {"maxItems": 1}, "[1, 2]"),
    ("minProperties", {"minProperties": 1}, "{}"),
    ("properties", {**AB, "anyOf": [{"required": ["a"]}]}, '{"b": "x"}'),
    ("oneOf", {"anyOf": [INT], "oneOf": [TEXT]}, "1"),
    ("required", {**AB, "required": ["zz"]}, '{"a": 1}'),
    ("required", {"type": "object", "additionalProperties": INT, "required": ["a"]}, "{}"),
    ("propertyNames", {**AB, "propertyNames": {"pattern": "^x"}}, '{"a": 1}'),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^x.*$": INT, "^.1$": TEXT}},
        '{"x1": 1}',
    ),
    ("multipleOf", {"type": "number", "multipleOf": 2}, "3"),
    ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 3}, "4"),
    ("multipleOf", {"type": "integer", "multipleOf": 2.5}, "1"),
    ("maxLength", {"type": "string", "pattern": "^a*$", "maxLength": 2}, '"aaa"'),
    ("maxLength", {"type": "string", "format": "date", "maxLength": 2}, '"2024-01-01"'),
    ("pattern", {"type": "string", "pattern": "^(?!a).*$"}, '"a"'),
    ("pattern", {"type": "string", "pattern": "^b$", "format": "date"}, '"2024-01-01"'),
    ("$dynamicRef", {"$defs": {"x": {"$dynamicAnchor": "q", **INT}}, "$dynamicRef": "#q"}, '"a"'),
]
# Not of JSON schema's own words, or nothing that the validator could fetch.
OTHER_LAPSES: list[tuple[str, Any]] = [
    ("$ref", {"$ref": "http://127.0.0.1:1/x"}),
    ("$ref", {"$ref": "#anchor", "$defs": {"x": {"$anchor": "anchor", **INT}}}),
    ("format", {"type": "string", "format": "iri"}),
    ("pattern", {"type": "string", "pattern": "a$|^b"}),
    ("dependencies", {**AB, "dependencies": {"a": ["b"]}}),
]
VALUES = [
    *("0", "1", "2", "4", "5", "7.5", "-5", "100", "null", "true", '""', '"a"', '"ab"', '"abc"'),
    *("{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}', '{"a": "x"}', '{"x1": 1}', '{"x": "y"}'),
    *("[]", "[1]", "[1, 2]", '["a"]', '[1, "a"]', "[1, 2, 3]", '"2024-01-01"', '"10:00:00Z"'),
]
ENFORCED: list[Any] = [
    True,
    {},
    INT,
    {"type": ["integer", "null"], "minimum": 2},
    {"type": ["string", "integer"], "minLength": 2, "minimum": 3},
    {"type": "integer", "minimum": 2, "maximum": 9},
    {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 9},
    {"type": "number", "minimum": 2, "maximum": 9},
    {"type": "integer", "multipleOf": 5},
    {"type": "string", "minLength": 2},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^a+$"},
    {"type": "string", "format": "date"},
    AB,
    HAS_A,
    {**AB, "additionalProperties": False, "required": ["a", "b"]},
    {**AB, "additionalProperties": TEXT},
    {**AB, "minProperties": 2},
    {**AB, "maxProperties": 1},
    {**AB, "unevaluatedProperties": False},
    {"properties": {"a": INT}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^x.*$": INT}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": INT},
    {"type": "array", "items": INT, "minItems": 1, "maxItems": 2, "uniqueItems": False},
    {"type": "array", "prefixItems": [INT, TEXT], "minItems": 2, "items": False},
    {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
    {"enum": [1, "a", None], "title": "x"},
    {"type": "string", "enum": ["a", "ab"]},
    {"type": "integer", "const": 5},
    {"anyOf": [INT, {"type": "null"}], "description": "x"},
    {"type": "object", "anyOf": [HAS_A, AB]},
    {"oneOf": [INT, TEXT]},
    {"oneOf": [{"const": 1}, {"enum": [2, 5]}]},
    {"oneOf": [{**HAS_A, "properties": {"a": {"const": value}}} for value in (1, 2)]},
    {"allOf": [{"type": "integer", "minimum": 2}]},
    {**DEFS, "$ref": "#/$defs/x"},
    {"$id": "http://a/b", **DEFS, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
    {"type": "integer", "default": 3, "examples": [{"not": 1}], "$comment": "not", "x-not": {}},
]


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(lambda: [bytes([byte]) for byte in range(256)])


def allows(schema: Any, text: str) -> bool:
    """Whether an output that is held to the schema may be this text."""
    from xgrammar import GrammarMatcher

    compiled = compile_here(vocabulary(), Grammar.json_schema(schema), 2)
    matcher = GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize(("keyword", "schema", "text"), LAPSES)
def test_what_is_said_to_be_unenforced_is(keyword: str, schema: Any, text: str) -> None:
    assert keyword in {lapse.keyword for lapse in unenforced(schema)}
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    assert allows(schema, text)
    with pytest.raises(UsageError, match=rf"{keyword.replace('$', '.')} at #"):
        Grammar.json_schema(schema, strict=True)


@pytest.mark.parametrize("schema", ENFORCED, ids=range(len(ENFORCED)))
def test_what_is_said_to_be_enforced_is(schema: Any) -> None:
    assert unenforced(schema) == []
    Grammar.json_schema(schema, strict=True)
    validator = Draft202012Validator(schema)
    allowed = [text for text in VALUES if allows(schema, text)]
    assert allowed or "patternProperties" in schema or "oneOf" in schema
    assert all(validator.is_valid(json.loads(text)) for text in allowed)


@pytest.mark.smoke
@pytest.mark.parametrize(("keyword", "schema"), OTHER_LAPSES)
def test_other_lapses_are_named_too(keyword: str, schema: Any) -> None:
    assert keyword in {lapse.keyword for lapse in unenforced(schema)}


@pytest.mark.smoke
def test_lapses_are_named_with_their_path() -> None:
    inner = {"type": "array", "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"a/b": inner, "c": {"anyOf": [INT, {"not": {}}]}},
        "$defs": {"d": {"type": "array", "items": inner}},
    }
    assert [str(lapse) for lapse in unenforced(schema)] == [
        "uniqueItems at #/properties/a~1b",
        "not at #/properties/c/anyOf/1",
        "uniqueItems at #/$defs/d/items",
    ]


@pytest.mark.smoke
def test_nonsense_is_no_surprise() -> None:
    """What it says of nonsense does not matter; who compiles it refuses it."""
    draw = random.Random(5)
    words = [*LEADING, *NEVER, *(word for words in OF_TYPE.values() for word in words)]
    words += ["type", "uniqueItems", "$defs", "definitions", "$id"]

    def junk(depth: int) -> Any:
        leaves = [None, True, 7, 0.5, "integer", "object", "string", "array", "^a$"]
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(leaves)
        if draw.random() < 0.3:
            return [junk(depth - 1) for _ in range(draw.randint(0, 3))]
        return {draw.choice(words): junk(depth - 1) for _ in range(draw.randint(0, 5))}

    for _ in range(3000):
        unenforced(junk(4))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "text", "count"),
    [
        ("regex", "a*b+c?", 1),
        ("regex", "a{3}", 3),
        ("regex", "a{2,70}b{5,}", 70),
        ("regex", "(a{10}b{20}){30}", 600),
        ("regex", "((a{10}){10}){10}", 1000),
        ("regex", "(a{10})(b{20})", 20),
        ("regex", r"a\{900}[{900}]\({5}", 5),
        ("regex", r"[\]{900}]{4}", 4),
        ("regex", "{x}{}", 1),
        ("ebnf", 'root ::= "a{900}" [b-d]{1,40} # {900}', 40),
        ("ebnf", 'root ::= ("a" [b]{3}){5}', 15),
    ],
)
def test_repetitions_are_counted(kind: str, text: str, count: int) -> None:
    assert most_repeated(kind, text) == count


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex(".{0,50000}x"), f"50000 times; the limit is {MAX_REPETITIONS}"),
        (lambda: Grammar.regex("((a{999}){999}){999}"), "within counts multiplied"),
        (lambda: Grammar.ebnf("root ::= [a]{20000}"), "20000 times"),
        (
            lambda: Grammar.json_schema({"items": {"type": "string", "pattern": "a{99999}"}}),
            "in pattern at #/items repeats",
        ),
        (
            lambda: Grammar.json_schema({"properties": {"a": {"minItems": 10**12}}}),
            rf"minItems at #/properties/a is 1e\+12; the limit is {MAX_COUNT}",
        ),
        (
            lambda: Grammar.structural_tag({"type": "regex", "pattern": "a{99999}"}),
            "repeats a part 99999 times",
        ),
    ],
)
def test_too_many_repetitions_are_named(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
    Grammar.regex(f"a{{{MAX_REPETITIONS}}}")
    Grammar.json_schema({"type": "string", "maxLength": MAX_COUNT})
