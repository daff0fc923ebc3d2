"""The last two steps: who is removed, in favour of whom.

Documents are gone through by rank. One is removed if an earlier one that is kept is similar to it:
in favour of the most similar of those. So a survivor is never removed itself, and which documents
survive depends on the verified pairs alone, not on the order of the input, units or workers.
A copy goes with its original: where that is removed too, the copy's survivor is the original's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ridgeline.data.corpus.duplicates.tables import ID, Numbers, id_halves, order_of

REMOVED = pa.schema([("id", ID), ("duplicate_of", ID), ("similarity", pa.float64())])


def remove_near(output: Path, inputs: Sequence[Path]) -> dict[str, Any]:
    """From all files of `PAIRS` to `REMOVED`. It holds all pairs: some 150 bytes each."""
    table = pa.concat_tables([pq.read_table(path) for path in inputs]).combine_chunks()
    first, second = id_halves(table["first"]), id_halves(table["second"])
    first_rank, second_rank = (table[f"{side}_rank"].to_numpy() for side in ("first", "second"))
    similarity = table["similarity"].to_numpy()
    # By the later document, and of its pairs the most similar first.
    order = order_of(second_rank, *second, -similarity, first_rank, *first)
    survivors = surviving_pairs(numbered(table["first"], table["second"]), order, similarity)
    return write_removed(
        output,
        table["second"].take(pa.array(survivors)),
        table["first"].take(pa.array(survivors)),
        similarity[survivors],
        "near",
    )


def numbered(first: Any, second: Any) -> tuple[Numbers, Numbers]:
    """The documents of pairs as whole numbers."""
    both = pa.chunked_array([*first.chunks, *second.chunks], ID).combine_chunks()
    numbers = both.dictionary_encode().indices.to_numpy()
    return numbers[: len(first)], numbers[len(first) :]


def surviving_pairs(pairs: tuple[Numbers, Numbers], order: Numbers, similarity: Numbers) -> Numbers:
    """Of each document that is removed, the pair with its survivor."""
    firsts, seconds = pairs[0][order].tolist(), pairs[1][order].tolist()
    removed: set[int] = set()
    chosen = []
    for place, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        if second not in removed and first not in removed:
            removed.add(second)
            chosen.append(place)
    return order[np.array(chosen, np.int64)]


def remove_exact(output: Path, inputs: Sequence[Path]) -> dict[str, Any]:
    """From `REMOVED` of the near ones and all files of `MENTIONS` to `REMOVED` of the copies."""
    near = pq.read_table(inputs[0])
    columns = ["id", "other"]
    copies = pa.concat_tables(
        [pq.read_table(path, columns=columns, filters=pc.field("exact")) for path in inputs[1:]]
    ).combine_chunks()
    place = pc.index_in(copies["other"], value_set=near["id"].combine_chunks())
    survivors = pc.coalesce(near["duplicate_of"].take(place), copies["other"])
    similarity = pc.fill_null(near["similarity"].take(place), 1.0).to_numpy()
    return write_removed(output, copies["id"], survivors, similarity, "exact")


def write_removed(
    output: Path, removed: Any, survivors: Any, similarity: Numbers, kind: str
) -> dict[str, Any]:
    """Sorted by the name of what is removed."""
    table = pa.Table.from_arrays([removed, survivors, pa.array(similarity)], schema=REMOVED)
    table = table.take(pa.array(order_of(*id_halves(table["id"]))))
    pq.write_table(table, output, compression="zstd")
    least = float(similarity.min()) if len(similarity) else 1.0
    return {kind: len(table), f"least_{kind}": least}
