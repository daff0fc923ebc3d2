"""The second step, a task a part of the shuffle: which pairs of documents are to be looked at.

Documents that share a value are in one bucket, sorted by what is in them; of copies it has only
the first. Each is paired with the first HEADS of its bucket and with the BEFORE just before it: in
buckets of up to HEADS + BEFORE + 1 that is every pair, and a bucket of a million costs 32 million
pairs and not 5·10^11. What that leaves out can keep a duplicate in the corpus and never removes
anything: pairs are verified, and only a verified pair with a kept document removes one.

A pair is written twice, with either of the two as `id`, sorted by the unit of that one: the next
step finds there whose shingles are wanted. Copies are written once, marked `exact`: `other` stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ridgeline.data.corpus.duplicates.signing import BANDS
from ridgeline.data.corpus.duplicates.tables import (
    ID,
    Numbers,
    begins,
    id_halves,
    ids_of,
    order_of,
    read_part,
)

HEADS, BEFORE = 16, 16
MENTIONS = pa.schema(
    [
        ("exact", pa.bool_()),
        ("unit", pa.int32()),  # where the text of `id` is
        ("id", ID),
        ("rank", pa.uint64()),
        ("other", ID),
        ("other_rank", pa.uint64()),
    ]
)
ROWS_TOGETHER = 1 << 15  # that a reader of one unit takes or passes over
PLACES_TOGETHER = 1 << 17  # whose pairs are made at once: up to 32 times as many


class Rows(NamedTuple):
    """Columns of sorted rows of `BANDS`."""

    exact: Numbers
    value: Numbers
    rank: Numbers
    high: Numbers
    low: Numbers
    unit: Numbers

    def at(self, index: Numbers) -> Rows:
        return Rows(*[column[index] for column in self])


def pair(output: Path, inputs: Sequence[Path], *, part: int) -> dict[str, Any]:
    """From the bands of all units to `MENTIONS`."""
    rows = sorted_rows(read_part(inputs, part, BANDS))
    is_first = begins(rows.exact, rows.value, rows.rank)
    copies = np.flatnonzero(rows.exact & ~is_first)
    originals = np.flatnonzero(is_first)[np.cumsum(is_first)[copies] - 1]
    near = rows.at(np.flatnonzero(~rows.exact & is_first))
    first, second, num_left_out = bucket_pairs(near)
    order = order_of(rows.high[copies], rows.low[copies])
    exact = mentions(rows, copies[order], originals[order])
    pq.write_table(
        pa.concat_tables([sorted_mentions(near, first, second), exact]),
        output,
        row_group_size=ROWS_TOGETHER,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
    )
    return {"left_out": num_left_out}


def sorted_rows(table: Any) -> Rows:
    high, low = id_halves(table["id"])
    exact, value, rank, unit = (
        table[name].to_numpy() for name in ("exact", "value", "rank", "unit")
    )
    rows = Rows(exact, value, rank, high, low, unit)
    return rows.at(order_of(exact, value, rank, high, low))


def bucket_pairs(rows: Rows) -> tuple[Numbers, Numbers, int]:
    """Rows of the two of each pair, each pair once though it shares several values, the earlier by
    rank first; and how many pairs of the buckets were left out.
    """
    size = len(rows.value)
    order = order_of(rows.rank, rows.high, rows.low)
    ordered = rows.at(order)
    is_new = begins(ordered.rank, ordered.high, ordered.low)
    document = np.empty(size, np.int64)
    document[order] = np.cumsum(is_new) - 1
    starts = np.flatnonzero(begins(rows.value))
    sizes = np.diff(np.append(starts, size))
    num_left_out = sum(n * (n - 1) // 2 for n in sizes.tolist())
    start = np.repeat(starts, sizes)
    keys = np.empty(0, np.int64)
    for begin in range(0, size, PLACES_TOGETHER):
        places = np.arange(begin, min(size, begin + PLACES_TOGETHER))
        others, own = paired_places(start, places)
        num_left_out -= len(own)
        one, other = document[own], document[others]
        made = np.minimum(one, other) * size + np.maximum(one, other)
        keys = np.unique(np.concatenate((keys, made)))
    first, second = np.divmod(keys, max(size, 1))
    row_of = order[is_new]  # of each document
    return row_of[first], row_of[second], num_left_out


def paired_places(start: Numbers, places: Numbers) -> tuple[Numbers, Numbers]:
    """The earlier and the later place of each pair whose later one is among `places`."""
    number = places - start[places]  # in its bucket
    earlier, later = [], []
    for back in range(1, BEFORE + 1):
        own = places[number >= back]
        earlier.append(own - back)
        later.append(own)
    for head in range(HEADS):
        own = places[number - head > BEFORE]
        earlier.append(start[own] + head)
        later.append(own)
    return np.concatenate(earlier), np.concatenate(later)


def sorted_mentions(rows: Rows, first: Numbers, second: Numbers) -> Any:
    """Either of two as `id`, by unit."""
    own, other = np.concatenate((first, second)), np.concatenate((second, first))
    order = order_of(
        rows.unit[own], rows.high[own], rows.low[own], rows.high[other], rows.low[other]
    )
    return mentions(rows, own[order], other[order])


def mentions(rows: Rows, own: Numbers, other: Numbers) -> Any:
    columns = [
        pa.array(rows.exact[own]),
        pa.array(rows.unit[own]),
        ids_of(rows.high[own], rows.low[own]),
        pa.array(rows.rank[own]),
        ids_of(rows.high[other], rows.low[other]),
        pa.array(rows.rank[other]),
    ]
    return pa.Table.from_arrays(columns, schema=MENTIONS)
