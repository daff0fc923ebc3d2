"""A climb in its folder: `climb.json`, written whole and read with care, since files get edited.

save_climb(climb, Path("out"))
climb = load_climb(Path("out"))      # or the file itself
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from ridgeline.errors import UsageError
from ridgeline.formats.fields import hints
from ridgeline.ladder.reporting.result import SCHEMA, Climb

FILE_NAME = "climb.json"
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def load_climb(path: Path) -> Climb:
    """From a folder that `optimize` wrote, or its climb.json; UsageError says what is wrong."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "give a folder that `ridgeline optimize` wrote"
        raise UsageError(f"there is no {file}; {hint}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as JSON: {_line(error)}") from error
    if not isinstance(document, Mapping):
        raise UsageError(f"{file} holds no climb, but {str(document)[:40]!r}")
    if document.get("schema", SCHEMA) != SCHEMA:
        raise UsageError(
            f"{file} is of schema {document['schema']!r}; this Ridgeline reads {SCHEMA}"
        )
    try:
        climb = Climb.from_json(document)
        _check(climb, Climb, "climb")
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise UsageError(f"{file} is no climb: {_line(error)}") from error
    return climb


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check(value: Any, kind: Any, name: str) -> None:
    """Raise ValueError for the first value whose type is not its field's, or that is no number."""
    if isinstance(kind, UnionType):
        if value is None:
            return
        kind = next(each for each in get_args(kind) if each is not NoneType)
    origin = get_origin(kind)
    if is_dataclass(kind):
        known = hints(kind)  # type: ignore[arg-type]
        for field in fields(kind):
            _check(getattr(value, field.name), known[field.name], f"{name}.{field.name}")
    elif origin is tuple:
        for index, each in enumerate(value):
            _check(each, get_args(kind)[0], f"{name}[{index}]")
    elif origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} is {value!r}; allowed are {', '.join(get_args(kind))}")
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _check_mapping(value, get_args(kind)[1], name)
    elif kind in WORDS:
        _check_plain(value, kind, name)


def _check_mapping(value: Any, kind: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; expected an object")
    for key, each in value.items():
        if kind is not Any:
            _check(each, kind, f"{name}.{key}")


def _check_plain(value: Any, kind: Any, name: str) -> None:
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r}; expected {WORDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; expected a finite number")
