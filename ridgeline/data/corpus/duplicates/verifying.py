"""The fourth step, a task a part: the similarity of each pair, counted; pairs below the threshold
are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ridgeline.data.corpus.duplicates.collecting import SETS
from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.planting import similarities
from ridgeline.data.corpus.duplicates.tables import ID, read_part

PAIRS = pa.schema(
    [
        ("first", ID),
        ("second", ID),
        ("first_rank", pa.uint64()),
        ("second_rank", pa.uint64()),
        ("similarity", pa.float64()),
    ]
)


def verify(
    output: Path, inputs: Sequence[Path], *, part: int, options: DuplicateOptions
) -> dict[str, Any]:
    """From the sets of all units to `PAIRS`."""
    table = read_part(inputs, part, SETS)
    seconds = table["seconds"].combine_chunks()
    number_of = {name: number for number, name in enumerate(table["id"].to_pylist())}
    counts = np.diff(seconds.offsets.to_numpy())
    first = np.repeat(np.arange(len(table)), counts)
    second = np.array([number_of[name] for name in seconds.flatten().to_pylist()], np.int64)
    shingles = table["shingles"].combine_chunks()
    hashes = torch.from_numpy(shingles.values.to_numpy().view(np.int64).copy())
    starts = torch.from_numpy(shingles.offsets.to_numpy().copy())
    pairs = torch.from_numpy(np.stack((first, second), axis=1))
    similarity = similarities(hashes, starts, pairs)
    kept = np.flatnonzero(similarity >= options.threshold)
    columns = [
        *(table["id"].take(pa.array(side[kept])) for side in (first, second)),
        *(table["rank"].take(pa.array(side[kept])) for side in (first, second)),
        pa.array(similarity[kept]),
    ]
    pq.write_table(pa.Table.from_arrays(columns, schema=PAIRS), output, compression="zstd")
    return {"candidates": len(first), "verified": len(kept)}
