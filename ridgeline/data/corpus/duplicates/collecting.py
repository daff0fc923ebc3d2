"""The third step, a task a unit: the shingles of those documents that are in a pair.

A pair is verified in one part of the shuffle, which the name of its first document says; the sets
of both go there, and the names of the second ones with the first's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.tables import (
    ID,
    Numbers,
    begins,
    id_halves,
    ids_of,
    order_of,
    packed,
    parts_file,
    texts,
)
from ridgeline.kernels.minhash import shingle_sets

SETS = pa.schema(
    [
        ("id", ID),
        ("rank", pa.uint64()),
        ("seconds", pa.large_list(ID)),  # of the pairs of this part in which it is the first
        ("shingles", pa.large_list(pa.uint64())),
    ]
)


def collect(
    output: Path, inputs: Sequence[Path], *, unit: int, parts: int, options: DuplicateOptions
) -> dict[str, Any]:
    """From a documents table and all files of `MENTIONS` to one row group of `SETS` a part."""
    wanted = WantedPairs(read_mentions(inputs[1:], unit), parts)
    names, sets = wanted_sets(inputs[0], wanted, options)
    row_of = {name: row for row, name in enumerate(names)}
    with parts_file(output, SETS) as file:
        for part in range(parts):
            file.write_table(wanted.table(part, row_of, sets))
    return {}


def read_mentions(inputs: Sequence[Path], unit: int) -> Any:
    """Those of near duplicates in this unit; row groups of other units are passed over."""
    condition = (pc.field("unit") == unit) & ~pc.field("exact")
    columns = ["id", "rank", "other", "other_rank"]
    return pa.concat_tables(
        [pq.read_table(path, columns=columns, filters=condition) for path in inputs]
    )


class WantedPairs:
    """The pairs of a unit's documents, sorted, each once."""

    def __init__(self, table: Any, parts: int) -> None:
        own, other = id_halves(table["id"]), id_halves(table["other"])
        rank, other_rank = table["rank"].to_numpy(), table["other_rank"].to_numpy()
        is_first = precedes((rank, *own), (other_rank, *other))
        part = np.where(is_first, own[1], other[1]) % np.uint64(parts)
        order = order_of(part, *own, *other)
        order = order[begins(part[order], *(half[order] for half in (*own, *other)))]
        self.part, self.is_first, self.rank = part[order], is_first[order], rank[order]
        self.own = (own[0][order], own[1][order])
        self.other = (other[0][order], other[1][order])

    def names(self) -> Any:
        return pc.unique(ids_of(*self.own))

    def table(self, part: int, row_of: dict[bytes, int], sets: Any) -> Any:
        """Rows of `SETS`: a document each."""
        begin, end = np.searchsorted(self.part, [part, part + 1])
        own = [half[begin:end] for half in self.own]
        is_new = begins(*own)
        places = np.flatnonzero(is_new)
        names = ids_of(own[0][places], own[1][places])
        document = np.cumsum(is_new) - 1
        is_first = self.is_first[begin:end]
        counts = np.bincount(document[is_first], minlength=len(places))
        seconds = ids_of(*(half[begin:end][is_first] for half in self.other))
        rows = pa.array([row_of[name] for name in names.to_pylist()], pa.int64())
        columns = [
            names,
            pa.array(self.rank[begin:end][places]),
            pa.LargeListArray.from_arrays(np.concatenate(([0], counts.cumsum())), seconds),
            sets.take(rows),
        ]
        return pa.Table.from_arrays(columns, schema=SETS)


def precedes(one: Sequence[Numbers], other: Sequence[Numbers]) -> Numbers:
    """Whether each of these tuples of numbers is less than the other."""
    result = np.zeros(len(one[0]), np.bool_)
    for left, right in zip(reversed(one), reversed(other), strict=True):
        result = (left < right) | ((left == right) & result)
    return result


def wanted_sets(
    path: Path, wanted: WantedPairs, options: DuplicateOptions
) -> tuple[list[bytes], Any]:
    """Names and shingles, as they stand in the table."""
    names = wanted.names()
    ordered: list[bytes] = []
    sets = [pa.array([], pa.large_list(pa.uint64()))]
    for table in texts(path, ["id"]) if len(names) else ():
        chosen = table.filter(pc.is_in(table["id"], value_set=names))
        hashes_S, starts = shingle_sets(*packed(chosen["text"]), ngram=options.ngram)
        values = pa.array(hashes_S.numpy().view(np.uint64))
        sets.append(pa.LargeListArray.from_arrays(starts.numpy(), values))
        ordered += chosen["id"].to_pylist()
    return ordered, pa.concat_arrays(sets)
