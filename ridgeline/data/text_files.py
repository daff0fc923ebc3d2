"""Reads text files of users, plain or gzip, with one-line errors.

text = read_text(Path("wikitext2_test.txt.gz"), max_bytes=100_000)
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError


def read_text(path: Path, max_bytes: int | None = None) -> str:
    """A UTF-8 file, plain or gzip, or its first bytes (a character cut in two is dropped)."""
    data = read_bytes(path, max_bytes)
    if not data.strip():
        raise UsageError(f"{path} is empty; give a file with some text")
    try:
        text = data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        was_cut = max_bytes is not None and error.start > len(data) - 4 and len(data) == max_bytes
        if not was_cut:
            raise UsageError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from None
        text = data[: error.start].decode("utf-8")
    if "\0" in text:
        raise UsageError(f"{path} is not text: it holds zero bytes; give a UTF-8 text file")
    return text


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a file, unpacked if it is gzip."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as source:
            return bytes(source.read(-1 if max_bytes is None else max_bytes))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a broken gzip file: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {str(path)!r}: {reason}; give a text file") from error


def json_object(line: str, origin: str) -> dict[str, Any]:
    """The object on one line of a JSON-lines file; `origin` names the line in errors."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{origin} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{origin} is {line[:60]!r}; expected an object")
    return row
