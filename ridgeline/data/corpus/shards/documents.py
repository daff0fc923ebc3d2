"""Documents tables as tokens are made of them: verdicts of later stages put in, by documents' ids.

for batch in judged_batches([table], {"near_duplicate": near}): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from ridgeline.errors import CorpusError

BATCH_ROWS = 4096
NEEDED = ("id", "file", "offset", "verdict", "text")


def judged_batches(tables: Sequence[Path], removed: Mapping[str, Path]) -> Iterator[Any]:
    """Record batches of documents tables, in their order. `removed`: by verdict, a Parquet file
    with the `id`s of documents that get it, if they were kept so far; the first of them counts.
    """
    verdicts = {name: _sorted_ids(path) for name, path in removed.items()}
    for path in tables:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                missing = [name for name in NEEDED if name not in file.schema_arrow.names]
                if missing:
                    raise CorpusError(f"{path} has no column {missing[0]!r}; build it again")
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    yield _judged(batch, verdicts)
        except (OSError, pyarrow.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise CorpusError(f"{path} is missing or damaged: {reason}; build it again") from None


def is_kept(batch: Any) -> Any:
    return pyarrow.compute.equal(batch.column("verdict"), "")


def _sorted_ids(path: Path) -> NDArray[Any]:
    return np.sort(_ids(pyarrow.parquet.read_table(path, columns=["id"]).column("id")))


def _ids(column: Any) -> NDArray[Any]:
    """As numpy has texts of a fixed size, which can be searched."""
    chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
    parts = [np.frombuffer(b"".join(chunk.to_pylist()), dtype="V16") for chunk in chunks]
    return np.concatenate([np.empty(0, "V16"), *parts]).view("S16")


def _judged(batch: Any, verdicts: Mapping[str, NDArray[Any]]) -> Any:
    if not verdicts:
        return batch
    ids, now = _ids(batch.column("id")), batch.column("verdict").cast(pyarrow.string())
    for name, removed in verdicts.items():
        places = np.searchsorted(removed, ids)
        is_named = np.zeros(len(ids), dtype=np.bool_)
        inside = places < len(removed)
        is_named[inside] = removed[places[inside]] == ids[inside]
        applies = pyarrow.compute.and_(pyarrow.array(is_named), pyarrow.compute.equal(now, ""))
        now = pyarrow.compute.if_else(applies, name, now)
    number = batch.schema.get_field_index("verdict")
    return batch.set_column(number, pyarrow.field("verdict", now.type), now)
