"""The documents table of a unit again, with documents that a later look has ruled out.

exclude(output, [table, contaminated], verdict="contaminated")      # a task
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ridgeline.data.corpus.shards.documents import judged_batches
from ridgeline.data.corpus.stages.documents import KEPT, SCHEMA, table_writer


def exclude(output: Path, inputs: Sequence[Path], *, verdict: str) -> dict[str, Any]:
    """Of a table, and of a file with the `id`s of the documents. The notes count verdicts, and the
    bytes of text that are left.
    """
    counts: Counter[str] = Counter()
    kept_bytes = 0
    with table_writer(output) as writer:
        for batch in judged_batches([inputs[0]], {verdict: inputs[1]}):
            names = batch.column("verdict").to_pylist()
            texts = [
                text if name == KEPT else None
                for name, text in zip(names, batch.column("text").to_pylist(), strict=True)
            ]
            counts.update(names)
            kept_bytes += sum(len(text.encode()) for text in texts if text is not None)
            place = batch.schema.get_field_index("text")
            column = pyarrow.array(texts, SCHEMA.field("text").type)
            writer.write_batch(batch.set_column(place, "text", column).select(SCHEMA.names))
    return {"verdicts": dict(sorted(counts.items())), "kept_bytes": kept_bytes}
