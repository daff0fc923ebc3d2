"""How often a regex, rules or a schema ask for something to be repeated: each repetition is a state
to be compiled and followed, so there is a limit.

    check_repetitions("regex", "[0-9]{1,200000}")       # a UsageError that names the limit
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ridgeline.errors import UsageError

MAX_REPETITIONS = 10_000  # of one part, and of parts within parts together
MAX_COUNT = 1_000_000  # in a schema, where xgrammar counts and does not repeat
COUNTED = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# What stands for itself (escapes, classes, quoted texts), groups, and a count with braces.
_PARTS = {
    "regex": re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(\()|(\))|\{(\d*)(,?)(\d*)\}", re.DOTALL),
    "ebnf": re.compile(
        r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(\()|(\))|\{(\d*)(,?)(\d*)\}', re.DOTALL
    ),
}


def check_repetitions(kind: str, text: str, where: str = "") -> None:
    """Raise a UsageError for a text of kind `regex` or `ebnf` that repeats too much."""
    count = most_repeated(kind, text)
    if count > MAX_REPETITIONS:
        shown = f"{count:.3g}" if count >= 10**9 else str(count)
        raise UsageError(
            f"the {kind}{where} repeats a part {shown} times; the limit is {MAX_REPETITIONS}, "
            "counts within counts multiplied; use * or + for no limit"
        )


def most_repeated(kind: str, text: str) -> int:
    """The largest product of counts within each other; a count that is open has its least one."""
    highest = [1]  # of the parts inside each group that is open
    ended = 1  # the highest inside the group that ended just now
    last_end = -1
    for match in _PARTS[kind].finditer(text):
        opens, closes, least, _, most = match.groups()
        if opens:
            highest.append(1)
        elif closes and len(highest) > 1:
            ended, last_end = highest.pop(), match.end()
            highest[-1] = max(highest[-1], ended)
        elif least is not None and (least or most):
            inside = ended if last_end == match.start() else 1
            count = max(int(number[:12]) for number in (least, most) if number)
            highest[-1] = max(highest[-1], count * inside)
    return max(highest)


def check_schema_repetitions(schema: Any) -> None:
    for part, path in _schemas(schema):
        for keyword in COUNTED:
            count = part.get(keyword)
            if isinstance(count, (int, float)) and count > MAX_COUNT:
                raise UsageError(
                    f"{keyword} at {path} is {count:g}; the limit is {MAX_COUNT}; give less, or "
                    "leave it out"
                )
        if isinstance(part.get("pattern"), str):
            check_repetitions("regex", part["pattern"], f" in pattern at {path}")


def _schemas(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object in it, as JSON is read, be it a schema or not: what is no schema has no such
    keyword.
    """
    waiting = [(schema, "#")]
    while waiting:
        part, path = waiting.pop()
        if isinstance(part, dict):
            yield part, path
            waiting += [(each, f"{path}/{name}") for name, each in part.items()]
        elif isinstance(part, list):
            waiting += [(each, f"{path}/{index}") for index, each in enumerate(part)]
