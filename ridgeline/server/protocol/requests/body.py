"""A body's bytes become plain JSON values that nothing behind has to fear.

Refused here: what is no UTF-8 or no JSON, NaN and Infinity, numbers beyond 64 bits or a float,
nesting that is too deep, and anything but an object at the top. Fields are checking.py's.

    read_json(b'{"model": "demo"}', max_depth=64)
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from ridgeline.server.protocol.errors import ApiError

LARGEST = 2**64 - 1  # a seed may have 64 bits
SMALLEST = -(2**63)
EXACT = 2**53  # up to here a float is exactly the whole number it looks like
MAX_ENTRIES = 4096  # of one object: each of them may be an error to tell of
# Lists and objects of a body: half a million keep the interpreter for half a second (2026-11).
MAX_CONTAINERS = 50_000
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class _BadValueError(Exception):
    """A value that cannot be taken; `path` grows on the way out, the innermost step first."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.path: list[str | int] = []


def read_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """The object in a body. Raises ApiError."""
    _check_containers(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {describe(value)}; give a JSON object")
    try:
        _check(value, max_depth)
    except _BadValueError as error:
        path = path_text(list(reversed(error.path))) or "the body"
        raise ApiError(400, f"{path} {error.problem}", param=path) from None
    return value


def _check_containers(body: bytes) -> None:
    """Before anything is made of it. Brackets in texts count for nothing."""
    if (
        _num_brackets(body) > MAX_CONTAINERS
        and _num_brackets(_STRING.sub(b"", body)) > MAX_CONTAINERS
    ):
        raise ApiError(
            400, f"the body is too intricate; give at most {MAX_CONTAINERS} lists and objects"
        )


def _num_brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _check(value: dict[str, Any] | list[Any], depth: int) -> None:
    """In JSON 2.0 is a whole number: it becomes one."""
    if depth == 0:
        raise _BadValueError("is nested too deeply; give fewer lists and objects in one another")
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise _BadValueError(f"has {len(value)} entries; give at most {MAX_ENTRIES}")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        kind = type(item)
        if kind is str or kind is bool or item is None:
            continue
        try:
            if kind is dict or kind is list:
                _check(item, depth - 1)
            elif kind is int:
                if not SMALLEST <= item <= LARGEST:
                    raise _BadValueError("is a number of more than 64 bits; give a smaller one")
            elif not -1e308 <= item <= 1e308:
                raise _BadValueError("is a number beyond 1e308; give a smaller one")
            elif item.is_integer() and -EXACT <= item <= EXACT:
                value[key] = int(item)  # type: ignore[index]
        except _BadValueError as error:
            error.path.append(key)
            raise


def path_text(path: list[str | int]) -> str:
    """`messages[0].content` for the steps to a value; what a client chose to call something is cut
    short.
    """
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = "".join(char if char.isprintable() else "?" for char in step[:64])
            text += f".{name}" if text else name
    return text[:300]


def describe(value: Any) -> str:
    """What was given, in a few words."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"a text of {len(value)} characters"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)
