"""The documents of a piece of a file, whatever the file is.

for document in piece_documents(piece, ReadOptions()): ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

from ridgeline.data.corpus.recipe import ReadOptions
from ridgeline.data.corpus.sources.document import RawDocument, refused
from ridgeline.data.corpus.sources.lines import (
    json_documents,
    separated_documents,
    whole_document,
)
from ridgeline.data.corpus.sources.packed import BrokenInput, open_unpacked
from ridgeline.data.corpus.sources.tables import arrow_documents, parquet_documents
from ridgeline.data.corpus.sources.web import html_file, warc_documents
from ridgeline.data.corpus.units.unit import FilePiece, FileState
from ridgeline.errors import CorpusError


def file_state(path: str) -> FileState:
    status = os.stat(path)
    return FileState(status.st_size, status.st_mtime_ns)


def piece_documents(piece: FilePiece, options: ReadOptions) -> Iterator[RawDocument]:
    """CorpusError where the file is no longer as it was when it was cut."""
    if piece.kind == "refused":
        yield refused(piece.begin, piece.num_bytes, piece.reason)
        return
    _check_unchanged(piece)
    last, is_empty = piece.begin, True
    try:
        for document in _documents(piece, options):
            yield document
            last, is_empty = document.offset + document.num_bytes, False
        if is_empty and not piece.begin:
            yield refused(0, 0, "no document in it")
    except BrokenInput as error:
        if not piece.reason:
            yield refused(last, 0, str(error))
    except OSError as error:
        yield refused(last, 0, f"cannot be read: {error.strerror or error}")
    if piece.reason:
        yield refused(last, 0, piece.reason)
    _check_unchanged(piece)


def _check_unchanged(piece: FilePiece) -> None:
    try:
        state = file_state(piece.file)
    except OSError as error:
        raise CorpusError(
            f"{piece.file} is gone since the build began: {error.strerror}; bring it back and give "
            "--resume, or build anew"
        ) from None
    if state != piece.state:
        raise CorpusError(
            f"{piece.file} changed while the corpus was built; --resume reads it again as it is now"
        )


def _documents(piece: FilePiece, options: ReadOptions) -> Iterator[RawDocument]:
    path, begin, end = piece.file, piece.begin, piece.end
    field, longest = options.text_field, options.max_document_bytes
    if piece.kind == "parquet":
        yield from parquet_documents(path, begin, end, field, longest)
    elif piece.kind == "arrow":
        yield from arrow_documents(path, begin, end, field, longest)
    elif piece.kind == "warc":
        with open(path, "rb") as archive:
            yield from warc_documents(archive, begin, end, longest)
    else:
        with closing(open_unpacked(path, piece.packing, options.max_ratio)) as file:
            if piece.kind == "lines":
                yield from json_documents(file, begin, end, field, longest)
            elif piece.kind == "html":
                yield html_file(file, longest)
            elif options.mark:
                yield from separated_documents(file, begin, end, options.mark, longest)
            else:
                yield whole_document(file, longest)
