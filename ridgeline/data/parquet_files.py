"""Rows of Parquet files, with one-line errors. pyarrow is in the extras `data` and `train`.

for number, row in parquet_rows(Path("train-00000.parquet")): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError

PARQUET_MARK = b"PAR1"  # what such a file begins with
ROWS_AT_ONCE = 256


def parquet_rows(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number from 1 on; with `columns`, those of them that the file has."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{path} is a Parquet file, which needs the package pyarrow; try: "
            "pip install 'ridgeline[data]', or give the rows as JSON lines"
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = None if columns is None else [name for name in names if name in columns]
            if columns is not None and not wanted:
                raise UsageError(
                    f"{path} has the columns {', '.join(names)}; expected {', '.join(columns)}"
                )
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} is a broken Parquet file: {reason}") from None
