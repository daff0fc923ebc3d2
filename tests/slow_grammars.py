"""Grammars that really take long to compile, with any vocabulary: choices in choices, where each
level multiplies what must be told apart. With 1,500 tokens 12 levels take half a minute.
"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.engine import Grammar


def slow_schema(number: int, levels: int = 12) -> dict[str, Any]:
    """None is like another."""
    schema: dict[str, Any] = {"type": "string", "maxLength": 300 + number}
    for level in range(levels):
        name = f"a{level}"
        member = {"type": "object", "properties": {name: schema}, "required": [name]}
        schema = {"anyOf": [member, {"type": "array", "items": schema, "maxItems": 5}]}
    return schema


def slow_grammar(number: int) -> Grammar:
    return Grammar.json_schema(json.dumps(slow_schema(number)))
