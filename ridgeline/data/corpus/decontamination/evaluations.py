"""The texts of evaluation sets, from files as `ridgeline eval --data` takes them: JSON lines or
Parquet, plain or gzip. Every text in a row counts by itself, in lists and objects too.

    task, name = evaluation_task({"hellaswag": "hellaswag_val.jsonl"})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ridgeline.data.corpus.ledger.task import WORK_FOLDER, CorpusTask, file_hash
from ridgeline.data.parquet_files import PARQUET_MARK, parquet_rows
from ridgeline.data.text_files import json_object, read_bytes, read_text
from ridgeline.errors import UsageError

EVALUATIONS = pa.schema([("set", pa.string()), ("row", pa.int64()), ("text", pa.string())])


def evaluation_task(files: Mapping[str, str]) -> tuple[CorpusTask, str]:
    """One that reads these sets, and the name of what it writes."""
    sets = {}
    for name, path in sorted(files.items()):
        if not Path(path).is_file():
            raise UsageError(f"the evaluation set {name} is to be in {path}, which is no file")
        sets[name] = [str(Path(path).resolve()), file_hash(Path(path))]
    output = f"{WORK_FOLDER}/evaluations/texts.parquet"
    return CorpusTask("evaluation sets", read_sets, output, (), {"sets": sets}), output


def read_sets(
    output: Path, inputs: Sequence[Path], *, sets: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Files by the names of the sets, each with its hash; to `EVALUATIONS`."""
    rows = [
        (name, number, text)
        for name, (path, digest) in sets.items()
        for number, text in set_texts(Path(path), digest)
    ]
    columns = [pa.array([row[field] for row in rows]) for field in range(3)]
    columns = [column.cast(kind.type) for column, kind in zip(columns, EVALUATIONS, strict=True)]
    pq.write_table(pa.Table.from_arrays(columns, schema=EVALUATIONS), output, compression="zstd")
    return {"evaluation_texts": len(rows)}


def set_texts(path: Path, digest: str) -> Iterator[tuple[int, str]]:
    """Row numbers from 1 on, and texts."""
    if file_hash(path) != digest:
        raise UsageError(f"{path} has changed since the build began; build again")
    for number, row in _rows(path):
        for text in texts_in(row):
            yield number, text


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if read_bytes(path, len(PARQUET_MARK)) == PARQUET_MARK:
        yield from parquet_rows(path)
        return
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, json_object(line, f"{path}:{number}")


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)
