"""The first step, a task a unit: the bands of each document, sorted into the parts of the shuffle.

A row says: this document has this value in some band. A document without words has none. One more
row, marked `exact`, has the hash of the whole text instead. `rank` orders documents by what is in
them: more shingles first, then by the hash of the text; copies have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

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
    values: list[Numbers] = []  # [D, bands + 1]; the last column is the whole text's
    has_words: list[Numbers] = []
    ranks: list[Numbers] = []
    ids: list[tuple[Numbers, Numbers]] = []
    planted = Planted()
    for table in texts(inputs[0], ["id", "text_hash"]):
        text_N, offsets = packed(table["text"])
        _, bands, counts = signatures(
            text_N, offsets, bands=options.bands, rows=options.rows, ngram=options.ngram
        )
        whole, rest = id_halves(table["text_hash"])
        values.append(np.column_stack((bands.numpy().view(np.uint64), whole)))
        has_words.append(counts.numpy() > 0)
        ranks.append(rank_of(counts.numpy(), rest))
        ids.append(id_halves(table["id"]))
        planted = planted.plus(plant(table, bands, counts, options))
    with parts_file(output, BANDS) as file:
        if not values:
            for _ in range(parts):
                file.write_table(BANDS.empty_table())
        else:
            high, low = (np.concatenate(half) for half in zip(*ids, strict=True))
            rows = _Rows(np.concatenate(values), np.concatenate(has_words))
            for document, column in rows.of_parts(parts):
                is_exact = column == options.bands
                columns = [
                    pa.array(is_exact),
                    pa.array(rows.values[document, column]),
                    pa.array(np.concatenate(ranks)[document]),
                    ids_of(high[document], low[document]),
                    pa.array(np.full(len(document), unit, np.int32)),
                ]
                file.write_table(pa.Table.from_arrays(columns, schema=BANDS))
    num_documents = sum(map(len, ranks))
    return {"documents": num_documents, **planted.counts()}


def rank_of(counts: Numbers, hashes: Numbers) -> Numbers:
    """`hashes`: the half of the text's hash that no `exact` row shows."""
    less = MOST_COUNTED - np.minimum(counts.astype(np.uint64), MOST_COUNTED)
    return (less << HASH_BITS) | (hashes >> (np.uint64(64) - HASH_BITS))


class _Rows:
    """Of all documents and bands, those that there are, by part."""

    def __init__(self, values: Numbers, has_words: Numbers) -> None:
        self.values, self.has_words = values, has_words

    def of_parts(self, parts: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Document and column of each row of a part, one part after the other."""
        there = np.repeat(self.has_words[:, None], self.values.shape[1], axis=1)
        there[:, -1] = True
        place = np.flatnonzero(there)
        part = (self.values.ravel()[place] % np.uint64(parts)).astype(np.int32)
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(parts + 1))
        for start, end in pairwise(bounds.tolist()):
            yield np.divmod(place[order[start:end]], self.values.shape[1])
