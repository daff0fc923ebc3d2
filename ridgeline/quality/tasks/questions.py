"""Rows of a task's file: JSON lines, plain or gzip, each checked for the fields the task needs.

for question in read_questions(path, read_hellaswag, limit=50): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.data.text_files import json_object, read_text
from ridgeline.errors import UsageError

QuestionRow = Mapping[str, Any]
Question = TypeVar("Question")


def read_questions(
    path: Path, read: Callable[[QuestionRow], Question], limit: int | None = None
) -> list[Question]:
    """The first questions of a file; an error that names the line of one that cannot be read."""
    questions: list[Question] = []
    for number, row in islice(_rows(path), limit):
        try:
            questions.append(read(row))
        except UsageError as error:
            raise UsageError(f"{path} line {number}: {error}") from None
    return questions


def _rows(path: Path) -> Iterator[tuple[int, QuestionRow]]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            yield number, json_object(line, f"{path} line {number}")


def text_of(row: QuestionRow, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name} is {_shown(row, name)}; expected some text")
    return value


def texts_of(row: QuestionRow, name: str) -> tuple[str, ...]:
    value = row.get(name)
    is_texts = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    if not is_texts or len(value) < 2:  # type: ignore[arg-type]
        raise UsageError(f"{name} is {_shown(row, name)}; expected a list of two texts or more")
    return tuple(value)  # type: ignore[arg-type]


def index_of(row: QuestionRow, name: str, num: int) -> int:
    """A whole number below `num`, written as one or as text."""
    value = row.get(name)
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not text.isdecimal() or int(text) >= num:
        raise UsageError(f"{name} is {_shown(row, name)}; expected a number from 0 to {num - 1}")
    return int(text)


def _shown(row: QuestionRow, name: str) -> str:
    return repr(str(row[name])[:60]) if name in row else "missing"
