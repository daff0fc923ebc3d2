"""From a batch to the files and bytes that it came from, and from a byte to the batch.

A step's batch is found without reading any other: the order is computed. What a window holds is
named with the document's place in its file and with tokens of the document; with a tokenizer, with
bytes of the document's cleaned text too.

    explain_batch(data.train, DataState(seed=7), step=1234, sequences=8)
    explain_byte(Path("corpus"), data.train, "crawl/a.jsonl", 123456, seed=7, sequences=8)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.corpora import corpora_of
from ridgeline.data.loading.windows import TokenWindows
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import CorpusError, UsageError

PREVIEW_TOKENS = 16


@dataclass(frozen=True)
class BatchPiece:
    """A part of a document in a batch."""

    sample: int  # of the run, from 0
    sequence: int  # of the batch, from 0
    file: str
    place: int  # the byte (or row, of a table) where the document begins in it
    first_token: int  # of the document
    num_tokens: int
    first_byte: int | None = None  # of the document's cleaned text
    num_bytes: int | None = None
    begins: str | None = None  # how the part reads


@dataclass(frozen=True)
class DocumentAccount:
    """What became of the document at a byte."""

    id: str
    file: str
    place: int
    verdict: str  # "" where it was kept
    num_tokens: int
    windows: tuple[int, ...] = ()  # that have tokens of it
    steps: tuple[int, ...] = ()  # of the first epoch that learn from them, rising
    is_held_out: bool = False  # a part of it


def explain_batch(
    windows: TokenWindows,
    *,
    seed: int,
    step: int,
    sequences: int,
    tokenizer: Tokenizer | None = None,
) -> list[BatchPiece]:
    """Of a step, numbered from 1 on."""
    if step < 1:
        raise UsageError(f"batch is {step}; steps are numbered from 1 on")
    first = (step - 1) * sequences
    samples = windows.order(seed).samples(first, sequences)
    return [
        piece
        for number, window in enumerate(samples.tolist())
        for piece in _pieces(windows, window, first + number, number, tokenizer)
    ]


def _pieces(
    windows: TokenWindows, window: int, sample: int, sequence: int, tokenizer: Tokenizer | None
) -> Iterator[BatchPiece]:
    store = windows.store
    pieces = windows.pieces(np.array([window]))
    for place, length, is_padding in zip(
        pieces.first.tolist(), pieces.lengths.tolist(), pieces.is_padding.tolist(), strict=True
    ):
        if is_padding:
            continue
        document = store.document_of(place)
        begin = int(store.offsets[document])
        origin = store.origin(document)
        span: tuple[int | None, int | None, str | None] = (None, None, None)
        if tokenizer is not None:
            ids = store.tokens_at(np.arange(begin, place + length))
            span = _byte_span(tokenizer, ids, place - begin)
        yield BatchPiece(
            sample=sample,
            sequence=sequence,
            file=origin.file,
            place=origin.line,
            first_token=place - begin,
            num_tokens=length,
            first_byte=span[0],
            num_bytes=span[1],
            begins=span[2],
        )


def _byte_span(tokenizer: Tokenizer, ids: NDArray[np.int64], first: int) -> tuple[int, int, str]:
    """Where the ids from `first` on lie in the text, less bytes that have no token."""
    sizes = [len(tokenizer.token_bytes(token)) for token in ids.tolist()]
    preview = tokenizer.decode(ids[first : first + PREVIEW_TOKENS].tolist())
    return sum(sizes[:first]), sum(sizes[first:]), preview


def explain_byte(
    folder: Path, windows: TokenWindows, file: str, byte: int, *, seed: int, sequences: int
) -> DocumentAccount:
    """The document that lies at a byte of a file (or a row of a table), kept or not."""
    base, best = 0, None
    for table in _tables(folder):
        row = _row_at(table.path, file, byte)
        if row is not None and (best is None or row["offset"] > best[0]["offset"]):
            best = row, base
        base += table.num_tokens
    if best is None:
        raise UsageError(f"{folder} has no document of {file!r} at {byte}; see the index's files")
    row, base = best
    account = DocumentAccount(
        id=row["id"].hex(),
        file=row["file"],
        place=row["offset"],
        verdict=row["verdict"],
        num_tokens=row["num_tokens"] or 0,
    )
    return account if account.verdict else _learned(account, windows, row, base, seed, sequences)


def _learned(
    account: DocumentAccount,
    windows: TokenWindows,
    row: dict[str, Any],
    base: int,
    seed: int,
    sequences: int,
) -> DocumentAccount:
    first, num_tokens = base + row["first_token"], row["num_tokens"]
    own, num_learned = windows.windows_between(first, first + num_tokens)
    order = windows.order(seed)
    numbers = [order.number_of(window) for window in own]
    steps = sorted({number // sequences + 1 for number in numbers if number is not None})
    return replace(
        account, windows=tuple(own), steps=tuple(steps), is_held_out=num_learned < num_tokens
    )


@dataclass(frozen=True)
class _Table:
    path: Path
    num_tokens: int


def _tables(folder: Path) -> Iterator[_Table]:
    """The tables of documents of a corpus, or of those of a mixture, in the order of the store."""
    from ridgeline.data.corpus.shards import read_index

    for corpus in corpora_of(folder):
        for entry in read_index(corpus).shards:
            yield _Table(corpus / entry.documents, entry.num_tokens)


def _row_at(path: Path, file: str, byte: int) -> dict[str, Any] | None:
    """The last row of a file that begins at a byte or before it."""
    import pyarrow
    import pyarrow.parquet

    columns = ["id", "file", "offset", "verdict", "first_token", "num_tokens"]
    try:
        filters = [("file", "=", file), ("offset", "<=", byte)]
        rows = pyarrow.parquet.read_table(path, columns=columns, filters=filters)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CorpusError(f"{path} is missing or damaged: {reason}; build it again") from None
    if not len(rows):
        return None
    row: dict[str, Any] = rows.sort_by("offset").slice(len(rows) - 1).to_pylist()[0]
    return row
