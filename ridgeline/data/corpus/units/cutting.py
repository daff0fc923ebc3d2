"""Cuts files into pieces of at most a unit's size, at places that later readers find again.

Lines and separated text are cut at bytes: a piece has what begins in it. Tables are cut at rows,
archives at records. To cut a packed file it is read once, which also finds out whether it is whole;
a piece of one is read by unpacking all before it.

    cut_files(output, [], files=[("a.jsonl", "lines", "")], options=ReadOptions())
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ridgeline.data.corpus.recipe import ReadOptions
from ridgeline.data.corpus.sources.packed import BrokenInput, unpacked_bytes
from ridgeline.data.corpus.sources.read import file_state
from ridgeline.data.corpus.sources.tables import (
    FAILURES,
    arrow_batches,
    check_column,
    first_line,
    parquet_file,
)
from ridgeline.data.corpus.sources.web import warc_records
from ridgeline.data.corpus.units.files import InputFile
from ridgeline.data.corpus.units.unit import FilePiece, FileState
from ridgeline.errors import CorpusError

SMALL_FILE_BYTES = 4096  # that a tiny file counts as: opening it costs as much


def cut_files(
    output: Path, inputs: Sequence[Path], *, files: Sequence[InputFile], options: ReadOptions,
    states: Sequence[FileState],
) -> dict[str, Any]:  # fmt: skip
    """A task: the pieces of some files, as JSON. `states` are there to be part of its key."""
    pieces = [
        piece
        for file, state in zip(files, states, strict=True)
        for piece in file_pieces(file, state, options)
    ]
    output.write_text(json.dumps([asdict(piece) for piece in pieces]))
    return {"pieces": len(pieces)}


def read_pieces(path: Path) -> list[FilePiece]:
    """What `cut_files` has written."""
    return [
        FilePiece(**values | {"state": FileState(**values["state"])})
        for values in json.loads(path.read_text())
    ]


def file_pieces(file: InputFile, state: FileState, options: ReadOptions) -> list[FilePiece]:
    """At least one: a file without documents, or that cannot be read, is refused."""
    whole = FilePiece(file.name, file.kind, file.packing, num_bytes=SMALL_FILE_BYTES, state=state)
    if file.kind == "refused":
        return [replace(whole, reason=file.reason)]
    if not state.num_bytes:
        return [_refused(whole, "empty")]
    if not os.access(file.name, os.R_OK):
        return [_refused(whole, "cannot be read: permission denied")]
    pieces: list[FilePiece] = []
    try:
        for piece in _pieces(whole, options):
            pieces.append(piece)
    except BrokenInput as error:
        pieces.append(_refused(whole, str(error)))
    except OSError as error:
        pieces.append(_refused(whole, f"cannot be read: {error.strerror or error}"))
    if file_state(file.name) != state:
        raise CorpusError(f"{file.name} changed while it was read; --resume reads it again")
    return pieces or [_refused(whole, "no document in it")]


def _refused(whole: FilePiece, reason: str) -> FilePiece:
    return replace(whole, kind="refused", reason=reason)


def _pieces(whole: FilePiece, options: ReadOptions) -> Iterator[FilePiece]:
    if whole.kind == "parquet":
        if whole.packing:
            raise BrokenInput("Parquet inside another packing; unpack it first")
        yield from _parquet_pieces(whole, options)
    elif whole.kind == "arrow":
        if whole.packing:
            raise BrokenInput("Arrow inside another packing; unpack it first")
        yield from _arrow_pieces(whole, options)
    elif whole.kind == "warc":
        yield from _warc_pieces(whole, options)
    elif whole.kind == "html" or not (whole.kind == "lines" or options.separator):
        yield replace(whole, num_bytes=max(SMALL_FILE_BYTES, whole.state.num_bytes))
    else:
        yield from _byte_pieces(whole, options)


def _byte_pieces(whole: FilePiece, options: ReadOptions) -> Iterator[FilePiece]:
    """What follows a place where a packed file is broken is lost, and the last piece tells it."""
    size, broken = whole.state.num_bytes, None
    if whole.packing:
        size, broken = unpacked_bytes(whole.file, whole.packing, options.max_ratio)
    if broken is not None and not size:
        raise broken
    for begin in range(0, size, options.unit_bytes):
        end = min(size, begin + options.unit_bytes)
        reason = str(broken) if broken is not None and end == size else ""
        num_bytes = max(SMALL_FILE_BYTES, end - begin)
        yield replace(whole, begin=begin, end=end, num_bytes=num_bytes, reason=reason)


def _parquet_pieces(whole: FilePiece, options: ReadOptions) -> Iterator[FilePiece]:
    with parquet_file(whole.file) as file:
        check_column(file.schema_arrow, options.text_field)
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        column = paths.index(options.text_field)
        row = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            size = group.column(column).total_uncompressed_size
            yield from _row_pieces(whole, row, group.num_rows, size, options)
            row += group.num_rows


def _arrow_pieces(whole: FilePiece, options: ReadOptions) -> Iterator[FilePiece]:
    try:
        for first, batch in arrow_batches(whole.file):
            check_column(batch.schema, options.text_field)
            size = batch.select([options.text_field]).get_total_buffer_size()
            yield from _row_pieces(whole, first, batch.num_rows, size, options)
    except FAILURES as error:
        raise BrokenInput(f"broken Arrow: {first_line(error)}") from None


def _row_pieces(
    whole: FilePiece, first: int, num_rows: int, num_bytes: int, options: ReadOptions
) -> Iterator[FilePiece]:
    """Of a row group or batch: as many as its column of texts takes units."""
    if not num_rows:
        return
    count = min(num_rows, -(-num_bytes // options.unit_bytes) or 1)
    for part in range(count):
        begin, end = (num_rows * number // count for number in (part, part + 1))
        size = num_bytes * (end - begin) // num_rows
        yield replace(whole, begin=first + begin, end=first + end, num_bytes=size)


def _warc_pieces(whole: FilePiece, options: ReadOptions) -> Iterator[FilePiece]:
    begin = 0
    size = whole.state.num_bytes
    last = -1
    with open(whole.file, "rb") as file:
        for record in warc_records(file):
            place = record.stream_pos
            if place <= last:
                raise BrokenInput("several records are packed as one; unpack the file first")
            if record.content_length > options.max_ratio * size:
                raise BrokenInput(
                    f"a record of more than {options.max_ratio} times the file's size"
                )
            if place - begin >= options.unit_bytes:
                yield replace(whole, begin=begin, end=place, num_bytes=place - begin)
                begin = place
            last = place
    if last >= 0:
        yield replace(whole, begin=begin, end=size, num_bytes=size - begin)
