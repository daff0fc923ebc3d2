"""Grammars that are small to write and large to compile, and some that nobody can obey. Each is a
function of a random generator that gives the field of a request; those of a kind differ, so that
none was compiled before.

    body |= draw_grammar(random.Random(7))
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

GrammarField = dict[str, Any]


def _schema(schema: Any) -> GrammarField:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def long_repetition(draw: random.Random) -> GrammarField:
    count = draw.randint(20_000, 50_000)
    return {"response_format": {"type": "regex", "pattern": f".{{0,{count}}}x"}}


def nested_choices(draw: random.Random) -> GrammarField:
    """Choices in choices: each level doubles what must be told apart."""
    schema: Any = {"type": "string", "maxLength": draw.randint(5, 500)}
    for level in range(draw.randint(8, 14)):
        name = f"{draw.choice('abcdef')}{level}"
        schema = {
            "anyOf": [
                {"type": "object", "properties": {name: schema}, "required": [name]},
                {"type": "array", "items": schema, "maxItems": draw.randint(1, 9)},
            ]
        }
    return _schema(schema)


def many_properties(draw: random.Random) -> GrammarField:
    names = [f"p{draw.randint(0, 10**9)}" for _ in range(draw.randint(200, 800))]
    kinds = [{"type": draw.choice(("string", "integer", "null"))} for _ in names]
    return _schema({"type": "object", "properties": dict(zip(names, kinds, strict=True))})


def endless_reference(draw: random.Random) -> GrammarField:
    name = f"d{draw.randint(0, 10**9)}"
    inner = {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}}}
    return _schema({"$defs": {name: inner}, "$ref": f"#/$defs/{name}"})


KINDS: tuple[Callable[[random.Random], GrammarField], ...] = (
    long_repetition, nested_choices, many_properties, endless_reference,
)  # fmt: skip


def draw_grammar(draw: random.Random) -> GrammarField:
    return draw.choice(KINDS)(draw)
