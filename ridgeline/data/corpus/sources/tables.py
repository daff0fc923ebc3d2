"""Documents of Parquet and Arrow files, Hugging Face's included: a range of rows, one column.

A file whose pages are damaged loses the rows from there on; each is told with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pyarrow.types

from ridgeline.data.corpus.sources.document import RawDocument, decoded, refused, too_long
from ridgeline.data.corpus.sources.packed import BrokenInput

ROWS_AT_ONCE = 256
FAILURES = (pyarrow.ArrowException, OSError, ValueError, MemoryError)
Batches = Iterator[tuple[int, Any]]  # first row, batch


def check_column(schema: Any, field: str) -> None:
    """BrokenInput where a table has no column of texts of this name, or several."""
    count = schema.names.count(field)
    if count != 1:
        names = ", ".join(schema.names[:8]) or "no column"
        what = f"has no column {field}; it has {names}" if not count else (
            f"has {count} columns named {field}"
        )  # fmt: skip
        raise BrokenInput(what)
    kind = schema.field(field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_string_view(kind)
    ):
        raise BrokenInput(f"column {field} is {kind}, no text")


@contextmanager
def parquet_file(path: str) -> Iterator[Any]:
    try:
        with pyarrow.parquet.ParquetFile(
            path, pre_buffer=False, page_checksum_verification=True
        ) as file:
            yield file
    except FAILURES as error:
        raise BrokenInput(f"broken Parquet: {first_line(error)}") from None


def parquet_documents(
    path: str, begin: int, end: int, field: str, max_bytes: int
) -> Iterator[RawDocument]:
    with parquet_file(path) as file:
        check_column(file.schema_arrow, field)
        batches = _parquet_batches(file, begin, end, field)
        yield from _documents(batches, begin, end, field, max_bytes)


def _parquet_batches(file: Any, begin: int, end: int, field: str) -> Batches:
    """Of the row groups that have rows of [begin, end)."""
    row = 0
    for number in range(file.metadata.num_row_groups):
        first, row = row, row + file.metadata.row_group(number).num_rows
        if first < end and row > begin:
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[number], columns=[field]):
                yield first, batch
                first += batch.num_rows


def arrow_batches(path: str) -> Batches:
    """Of a file or a stream; what is not read of them stays on the disk."""
    with pyarrow.memory_map(path) as source:
        try:
            opened = pyarrow.ipc.open_file(source)
            batches: Iterable[Any] = map(opened.get_batch, range(opened.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
        row = 0
        for batch in batches:
            yield row, batch
            row += batch.num_rows


def arrow_documents(
    path: str, begin: int, end: int, field: str, max_bytes: int
) -> Iterator[RawDocument]:
    yield from _documents(_arrow_parts(path, begin, end, field), begin, end, field, max_bytes)


def _arrow_parts(path: str, begin: int, end: int, field: str) -> Batches:
    for first, batch in arrow_batches(path):
        if first >= end:
            return
        check_column(batch.schema, field)
        for start in range(max(0, begin - first), batch.num_rows, ROWS_AT_ONCE):
            yield first + start, batch.slice(start, ROWS_AT_ONCE)


def _documents(
    batches: Batches, begin: int, end: int, field: str, max_bytes: int
) -> Iterator[RawDocument]:
    row = begin
    try:
        for first, batch in batches:
            texts = batch.column(batch.schema.get_field_index(field))
            for number, text in enumerate(_as_bytes(texts), first):
                if begin <= number < end:
                    yield _document(text, number, field, max_bytes)
                    row = number + 1
    except FAILURES as error:
        for number in range(row, end):
            yield refused(number, 0, f"broken from row {row} on: {first_line(error)}")


def _as_bytes(texts: Any) -> list[bytes | None]:
    """A text that is not UTF-8 stays alone that way."""
    if pyarrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    values: list[bytes | None] = texts.cast(pyarrow.large_binary()).to_pylist()
    return values


def _document(data: bytes | None, row: int, field: str, max_bytes: int) -> RawDocument:
    if data is None:
        return refused(row, 0, f"{field} is null")
    if len(data) > max_bytes:
        return too_long(row, len(data), max_bytes)
    return decoded(data, row)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
