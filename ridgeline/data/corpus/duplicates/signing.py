"""The first step, a task a unit: the bands of each document, sorted into the parts of the shuffle.

A row says: this document has this value in some band. A document without words has none. One more
row, marked `exact`, has the hash of the whole text instead. `rank` orders documents by what is in
them: more shingles first, then by the hash of the text; copies have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.planting import Planted, plant
from ridgeline.data.corpus.duplicates.tables import (
    ID,
    Numbers,
    id_halves,
    ids_of,
    packed,
    parts_file,
    texts,
)
from ridgeline.kernels.minhash import signatures

BANDS = pa.schema(
    [
        ("exact", pa.bool_()),
        ("value", pa.uint64()),
        ("rank", pa.uint64()),
        ("id", ID),
        ("unit", pa.int32()),
    ]
)
HASH_BITS = np.uint64(40)  # of a rank; the bits above are its number of shingles
MOST_COUNTED = np.uint64(2**24 - 1)


def sign(
    output: Path, inputs: Sequence[Path], *, unit: int, parts: int, options: DuplicateOptions
) -> dict[str, Any]:
    """From a documents table to one row group of `BANDS` a part."""
    rows = UnitRows(pq.read_metadata(inputs[0]).num_rows, options.bands)
    planted = Planted()
    for table in texts(inputs[0], ["id", "text_hash"]):
        text_N, offsets = packed(table["text"])
        _, bands, counts = signatures(
            text_N, offsets, bands=options.bands, rows=options.rows, ngram=options.ngram
        )
        rows.add(table, bands.numpy().view(np.uint64), counts.numpy())
        planted = planted.plus(plant(table, bands, counts, options))
    with parts_file(output, BANDS) as file:
        for part in range(parts):
            file.write_table(rows.table(part, parts, unit))
    return {"documents": rows.num_documents, **planted.counts()}


class UnitRows:
    """What the rows of a unit are made of: room for so many documents is taken at once."""

    def __init__(self, most: int, num_bands: int) -> None:
        self.num_documents = 0
        self._exact = num_bands  # the column of the whole text's value
        self._values = np.empty((most, num_bands + 1), np.uint64)
        self._has_words = np.empty(most, np.bool_)
        self._rank, self._high, self._low = np.empty((3, most), np.uint64)

    def add(self, table: Any, bands_DB: Numbers, counts_D: Numbers) -> None:
        own = slice(self.num_documents, self.num_documents + len(table))
        whole, rest = id_halves(table["text_hash"])
        self._values[own, :-1], self._values[own, -1] = bands_DB, whole
        self._has_words[own] = counts_D > 0
        self._rank[own] = rank_of(counts_D, rest)
        self._high[own], self._low[own] = id_halves(table["id"])
        self.num_documents += len(table)

    def table(self, part: int, parts: int, unit: int) -> Any:
        is_own = self._values[: self.num_documents] % np.uint64(parts) == part
        is_own[:, :-1] &= self._has_words[: self.num_documents, None]
        document, column = is_own.nonzero()
        columns = [
            pa.array(column == self._exact),
            pa.array(self._values[document, column]),
            pa.array(self._rank[document]),
            ids_of(self._high[document], self._low[document]),
            pa.array(np.full(len(document), unit, np.int32)),
        ]
        return pa.Table.from_arrays(columns, schema=BANDS)


def rank_of(counts: Numbers, hashes: Numbers) -> Numbers:
    """`hashes`: the half of the text's hash that no `exact` row shows."""
    less = MOST_COUNTED - np.minimum(counts.astype(np.uint64), MOST_COUNTED)
    return (less << HASH_BITS) | (hashes >> (np.uint64(64) - HASH_BITS))
