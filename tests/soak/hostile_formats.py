"""Grammars that nobody should send, for a body's `response_format`: those that take long or much to
compile, those that are refused, and those that try to write into the log. Each is a function of a
random generator, and those of a kind differ from each other, so that no cache has them.

    body["response_format"] = slow_format(random.Random(7))
    kind, format = draw_hostile_format(random.Random(7))
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

from slow_grammars import slow_schema

FORGED_EVENT = "forged-by-a-client"  # no line of the log may have it as its event


def slow_format(draw: random.Random) -> dict[str, Any]:
    """Ten seconds and more to compile, within the limit on repetitions, with any vocabulary. Its
    request ends with 400 (too slow), 429 (too many) or an answer.
    """
    return _schema(slow_schema(draw.randint(0, 300), levels=draw.randint(11, 12)))


def huge_format(draw: random.Random) -> dict[str, Any]:
    """Beyond the limit on repetitions: refused at once with 400."""
    count = draw.randint(20_000, 10**9)
    form = draw.choice(("regex", "nested", "rules", "schema"))
    if form == "regex":
        return _regex(f".{{0,{count}}}{_word(draw)}")
    if form == "nested":
        return _regex(f"((({_word(draw)}{{{draw.randint(200, 900)}}}){{500}}){{500}})")
    if form == "rules":
        return {"type": "grammar", "grammar": f'root ::= "{_word(draw)}"{{{count}}}'}
    return _schema({"type": "array", "items": {"type": "string"}, "maxItems": 10**6 + count})


def strict_format(draw: random.Random) -> dict[str, Any]:
    """A strict schema with a part that cannot be enforced: refused with 400 by its name."""
    part = draw.choice(
        (
            {"type": "array", "uniqueItems": True},
            {"type": "integer", "not": {"const": draw.randint(0, 99)}},
            {"type": "array", "contains": {"const": _word(draw)}},
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            {"$ref": f"http://127.0.0.1:1/{_word(draw)}"},
            {"allOf": [{"type": "string"}, {"minLength": 3}]},
        )
    )
    schema = {"type": "object", "properties": {_word(draw): part}}
    return _schema(schema, strict=True)


def forging_format(draw: random.Random) -> dict[str, Any]:
    """Text that xgrammar puts into its warnings as it is: line ends, and what looks like a line of
    the log.
    """
    line = json.dumps({"time": "2026-01-01T00:00:00.000Z", "level": "error", "event": FORGED_EVENT})
    text = f"{_word(draw)}\n{line}\n\x1b[2J\r{_word(draw)}"
    form = draw.choice(("ref", "pattern", "regex"))
    if form == "ref":
        return _schema({"$ref": text})
    if form == "pattern":
        return _schema({"type": "string", "pattern": f"(?={text})a"})
    return _regex(f"(?!{text})[a-c]{{3}}")


HOSTILE_FORMATS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "slow": slow_format,
    "huge": huge_format,
    "strict": strict_format,
    "forging": forging_format,
}


def draw_hostile_format(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """One of any kind, and its kind."""
    kind = draw.choice(sorted(HOSTILE_FORMATS))
    return kind, HOSTILE_FORMATS[kind](draw)


def trivial_format(draw: random.Random) -> dict[str, Any]:
    """What a well-behaved client sends: milliseconds to compile, and none like another."""
    name = _word(draw)
    schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    return _schema(schema, strict=True)


def _regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def _schema(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "hostile", "schema": schema, "strict": strict},
    }


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=8))
