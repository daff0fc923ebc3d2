"""Files of training data as rows: plain text, JSON lines (both also .gz) and Parquet.

A row is a text, a prompt with its completion, or a conversation. A line that is none of these is
put into the `Quarantine` with its number and the reason, and reading goes on; a file that cannot be
read at all is an error. Nothing here knows tokens.

    quarantine = Quarantine()
    for row in read_rows([Path("chats.jsonl.gz")], quarantine): ...
    quarantine.summary()                # "2 rows quarantined: chats.jsonl.gz line 7 is not JSON …"
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from ridgeline.data.parquet_files import PARQUET_MARK, parquet_rows
from ridgeline.data.text_files import json_object
from ridgeline.errors import UsageError
from ridgeline.formats.files import atomic_write

FIELDS = ("messages", "prompt", "completion", "text", "tools")
LINE_ENDINGS = (".jsonl", ".ndjson", ".json")
PACKABLE_ENDINGS = (".txt", ".jsonl", ".ndjson")  # of files that a folder is searched for, and .gz
PIECE_CHARACTERS = 2**18  # longer texts are tokenized in pieces of this size
LINES_TRIED = 1000  # for a place where a piece may end
MAX_LINE_BYTES = 2**26
MAX_NAMED = 10_000  # quarantined rows that are kept with their reasons; all are counted


@dataclass(frozen=True)
class Origin:
    """Where a document comes from."""

    file: str
    line: int  # from 1 on, or the row of a Parquet file; 1 for a text file
    is_byte: bool = False  # the line is a byte of the file instead

    def __str__(self) -> str:
        kind = "byte" if self.is_byte else "line"
        kind = "row" if self.file.endswith(".parquet") else kind
        return f"{self.file} {kind} {self.line}"


@dataclass(frozen=True)
class TextRow:
    """A text, or a piece of a long one."""

    origin: Origin
    text: str
    is_first: bool = True  # the document begins with it
    is_last: bool = True


@dataclass(frozen=True)
class CompletionRow:
    origin: Origin
    prompt: str
    completion: str


@dataclass(frozen=True)
class ConversationRow:
    origin: Origin
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


DataRow = TextRow | CompletionRow | ConversationRow


@dataclass
class Quarantine:
    """Rows that were left out, with the reasons."""

    rows: list[tuple[Origin, str]] = field(default_factory=list)  # the first MAX_NAMED of them
    count: int = 0

    def add(self, origin: Origin, reason: str) -> None:
        self.count += 1
        if len(self.rows) < MAX_NAMED:
            self.rows.append((origin, reason))

    def summary(self) -> str:
        """One line for people: how many, and the first."""
        if not self.count:
            return "no row quarantined"
        origin, reason = self.rows[0]
        first = f"{origin}: {reason}"
        return (
            f"1 row quarantined: {first}"
            if self.count == 1
            else (f"{self.count:,} rows quarantined, the first is {first}")
        )

    def write(self, path: Path) -> None:
        """JSON lines with file, line and reason."""
        with atomic_write(path) as file:
            for origin, reason in self.rows:
                document = {"file": origin.file, "line": origin.line, "reason": reason}
                file.write(json.dumps(document, ensure_ascii=False) + "\n")
            if self.count > len(self.rows):
                file.write(json.dumps({"not_listed": self.count - len(self.rows)}) + "\n")


def data_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and of folders all whose names end as data does, in the order of names."""
    if not paths:
        raise UsageError("no data; give a file or a folder with --data")
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{str(path)!r} does not exist; give a file or a folder with data")
        files += _files_in(path) if path.is_dir() else [path]
    return files


def _files_in(folder: Path) -> list[Path]:
    wanted = (*PACKABLE_ENDINGS, *(f"{ending}.gz" for ending in PACKABLE_ENDINGS), ".parquet")
    files = sorted(
        path for path in folder.rglob("*") if path.name.endswith(wanted) and path.is_file()
    )
    if not files:
        raise UsageError(
            f"{folder} has no data: no file in it ends with {', '.join(wanted)}; name others singly"
        )
    return files


def read_rows(files: Iterable[Path], quarantine: Quarantine) -> Iterator[DataRow]:
    """Every row of the files that can be used."""
    for path in files:
        with _opened(path) as file:
            mark = file.read(len(PARQUET_MARK))
        if mark == PARQUET_MARK:
            yield from _table_rows(path, quarantine)
        elif path.name.removesuffix(".gz").endswith(LINE_ENDINGS):
            yield from _line_rows(path, quarantine)
        else:
            yield from _text_rows(path, quarantine)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file for reading, unpacked if it is gzip; what goes wrong is one line."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as source:
            yield cast(BinaryIO, source)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a broken gzip file: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _table_rows(path: Path, quarantine: Quarantine) -> Iterator[DataRow]:
    for number, values in parquet_rows(path, FIELDS):
        yield from _row_of(values, Origin(str(path), number), quarantine)


def _line_rows(path: Path, quarantine: Quarantine) -> Iterator[DataRow]:
    number = 0
    with _opened(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            origin = Origin(str(path), number)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                quarantine.add(origin, f"longer than {MAX_LINE_BYTES} bytes")
            elif line.strip():
                yield from _line_row(line, origin, quarantine)


def _line_row(line: bytes, origin: Origin, quarantine: Quarantine) -> Iterator[DataRow]:
    try:
        values = json_object(line.decode("utf-8"), "the line")
    except UnicodeDecodeError as error:
        quarantine.add(origin, f"not UTF-8: {error.reason} at byte {error.start}")
    except (UsageError, RecursionError) as error:
        quarantine.add(origin, str(error))
    else:
        yield from _row_of(values, origin, quarantine)


def _row_of(values: Mapping[str, Any], origin: Origin, quarantine: Quarantine) -> Iterator[DataRow]:
    """The row that these values make: the first of messages, prompt and text that they have."""
    try:
        if values.get("messages") is not None:
            yield ConversationRow(origin, _messages(values), _tools(values))
        elif values.get("prompt") is not None:
            yield CompletionRow(origin, _text(values, "prompt"), _text(values, "completion"))
        elif values.get("text") is not None:
            yield from _pieces(_text(values, "text"), origin)
        else:
            names = ", ".join(map(str, list(values)[:8])) or "no field"
            raise UsageError(f"has {names}; expected text, messages, or prompt and completion")
    except UsageError as error:
        quarantine.add(origin, str(error))


def _text(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name)
    if not isinstance(text, str):
        raise UsageError(f"{name} is {str(text)[:40]!r}; expected a text")
    if not text.strip():
        raise UsageError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} has half of a surrogate pair (U+D800 to U+DFFF)") from None
    return text


def _messages(values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = values["messages"]
    is_list = isinstance(messages, list) and all(isinstance(entry, dict) for entry in messages)
    if not is_list or not messages:
        raise UsageError(f"messages is {str(messages)[:40]!r}; expected a list of objects")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise UsageError(f"message {number} has no role")
    # columns of a table have every field in every row: None where a message has none
    return [{key: item for key, item in entry.items() if item is not None} for entry in messages]


def _tools(values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    tools = values.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise UsageError(f"tools is {str(tools)[:40]!r}; expected a list of objects")
    return tools


def _pieces(text: str, origin: Origin) -> Iterator[TextRow]:
    """A text in pieces of PIECE_CHARACTERS, cut before line ends where there are some."""
    start = 0
    while start < len(text):
        end = _cut(text, start)
        yield TextRow(origin, text[start:end], start == 0, end == len(text))
        start = end


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends: before a line end behind a letter, where every
    tokenizer's words end too, so that the tokens are those of the whole text.
    """
    limit = start + PIECE_CHARACTERS
    if limit >= len(text):
        return len(text)
    line_end = limit
    for _ in range(LINES_TRIED):
        line_end = text.rfind("\n", start + 1, line_end)
        if line_end < 0:
            return limit
        if text[line_end - 1].isalpha():
            return line_end
    return line_end


def _text_rows(path: Path, quarantine: Quarantine) -> Iterator[TextRow]:
    """A whole file as one document, read piece by piece."""
    origin, decoder = Origin(str(path), 1), codecs.getincrementaldecoder("utf-8")()
    text, is_first, num_bytes = "", True, 0
    with _opened(path) as file:
        while data := file.read(4 * PIECE_CHARACTERS):
            try:
                text += decoder.decode(data)
            except UnicodeDecodeError as error:
                place = num_bytes + error.start
                raise UsageError(f"{path} is not UTF-8 text: {error.reason} at {place}") from None
            if "\0" in text:
                raise UsageError(f"{path} is not text: it holds zero bytes; give UTF-8 text")
            num_bytes += len(data)
            start = 0
            while len(text) - start > PIECE_CHARACTERS:
                end = _cut(text, start)
                yield TextRow(origin, text[start:end], is_first, False)
                start, is_first = end, False
            text = text[start:]
    if decoder.getstate()[0]:
        raise UsageError(f"{path} is not UTF-8 text: it ends inside a character")
    if is_first and not text.strip():
        quarantine.add(origin, "the file is empty")
    else:
        yield TextRow(origin, text, is_first, True)
