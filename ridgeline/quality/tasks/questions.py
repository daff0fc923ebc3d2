"""Rows of a task's file, JSON lines (plain or gzip) or Parquet, each checked for the fields the
task needs.

for question in read_questions(path, read_hellaswag, limit=50): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ridgeline.data.parquet_files import PARQUET_MARK, parquet_rows
from ridgeline.data.text_files import json_object, read_bytes, read_text
from ridgeline.errors import UsageError

QuestionRow = Mapping[str, Any]
Question = TypeVar("Question")

NO_ANSWER = ("", "-1")  # what test splits on the hub have instead of one


def read_questions(
    path: Path, read: Callable[[QuestionRow], Question], limit: int | None = None
) -> list[Question]:
    """The first questions of a file; an error that names the line of one that cannot be read."""
    questions: list[Question] = []
    for origin, row in islice(_rows(path), limit):
        try:
            questions.append(read(row))
        except UsageError as error:
            raise UsageError(f"{origin}: {error}") from None
    if not questions:
        raise UsageError(f"{path} has no questions; give a file with some")
    return questions


def _rows(path: Path) -> Iterator[tuple[str, QuestionRow]]:
    """Each row, and the file and line to name in errors."""
    if read_bytes(path, len(PARQUET_MARK)) == PARQUET_MARK:
        for number, row in parquet_rows(path):
            yield f"{path} row {number}", row
        return
    for number, line in enumerate(read_text(path).split("\n"), 1):  # texts may hold U+2028
        if line.strip():
            origin = f"{path} line {number}"
            yield origin, json_object(line, origin)


def text_of(row: QuestionRow, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        _refuse(row, name, "some text")
    return value


def texts_of(row: QuestionRow, name: str) -> tuple[str, ...]:
    value = row.get(name)
    is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not is_texts or len(value) < 2:  # type: ignore[arg-type]
        _refuse(row, name, "a list of two texts or more")
    return tuple(value)  # type: ignore[arg-type]


def index_of(row: QuestionRow, name: str, num: int) -> int:
    """A whole number below `num`, written as one or as text."""
    text = _label(row, name)
    if not text.isdecimal() or int(text) >= num:
        _refuse_answer(row, name, f"a number from 0 to {num - 1}")
    return int(text)


def one_of(row: QuestionRow, name: str, words: Sequence[str]) -> int:
    """Which of the words the row has, a number that is written as one included."""
    text = _label(row, name).strip()
    if text not in words:
        _refuse_answer(row, name, f"one of {', '.join(words)}")
    return words.index(text)


def labelled_choices(row: QuestionRow, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts and labels of an object that has a list of each."""
    value = row.get(name)
    if not isinstance(value, dict):
        _refuse(row, name, "an object with text and label")
    parts = {f"{name}.{key}": part for key, part in value.items()}
    texts, labels = texts_of(parts, f"{name}.text"), texts_of(parts, f"{name}.label")
    if len(texts) != len(labels):
        _refuse(parts, f"{name}.label", f"{len(texts)} labels, one for each text")
    return texts, labels


def _label(row: QuestionRow, name: str) -> str:
    value = row.get(name)
    return str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""


def _refuse_answer(row: QuestionRow, name: str, expected: str) -> NoReturn:
    is_hidden = name in row and str(row[name]) in NO_ANSWER
    _refuse(row, name, expected + ("; take a split that has answers" if is_hidden else ""))


def _refuse(row: QuestionRow, name: str, expected: str) -> NoReturn:
    given = repr(str(row[name])[:60]) if name in row else "missing"
    raise UsageError(f"{name} is {given}; expected {expected}")
