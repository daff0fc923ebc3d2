"""Files between the tasks: Parquet whose row groups are the parts of a shuffle, so that a task
reads its own part of every file and nothing else; and 16-byte names as two numbers that sort alike.

    with parts_file(output, SCHEMA) as file: file.write_table(rows_of_part_0); ...
    read_part(inputs, 3, SCHEMA)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

ID = pa.binary(16)
Numbers = NDArray[Any]
TEXT_ROWS = 4096  # of a documents table that are read together


def parts_file(path: Path, schema: Any) -> Any:
    """A writer; each table given to it becomes a row group, an empty one too."""
    return pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, use_dictionary=False
    )


def read_part(inputs: Sequence[Path], part: int, schema: Any) -> Any:
    """The rows of one part, of all files."""
    tables = [schema.empty_table()]
    for path in inputs:
        with pq.ParquetFile(path) as file:
            tables.append(file.read_row_group(part))
    return pa.concat_tables(tables).combine_chunks()


def id_halves(column: Any) -> tuple[Numbers, Numbers]:
    """The 16 bytes of each name as two unsigned numbers, the more telling one first."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    data = np.frombuffer(column.buffers()[1], dtype=">u8")
    data = data[2 * column.offset : 2 * (column.offset + len(column))]
    pairs = data.astype(np.uint64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def ids_of(high: Numbers, low: Numbers) -> Any:
    """The column that `id_halves` took apart."""
    data = np.stack((high, low), axis=1).astype(">u8").tobytes()
    return pa.Array.from_buffers(ID, len(high), [None, pa.py_buffer(data)])


def order_of(*columns: Numbers) -> Numbers:
    """How rows are sorted by these columns, the first counting most."""
    return np.lexsort(columns[::-1])


def begins(*columns: Numbers) -> NDArray[np.bool_]:
    """Whether each of sorted rows differs from the one before it."""
    first = np.ones(len(columns[0]), dtype=np.bool_)
    if len(first):
        first[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return first


def texts(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Batches of a documents table, of documents that nothing has dropped so far."""
    with pq.ParquetFile(path) as file:
        wanted = [*columns, "text"]
        batches = file.iter_batches(TEXT_ROWS, columns=[*wanted, "verdict"])
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            yield rows.filter(pa.compute.equal(rows["verdict"], "")).select(wanted)


def packed(column: Any) -> tuple[Tensor, Tensor]:
    """Texts as the kernels take them: bytes end to end, and where each begins."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    column = column.cast(pa.large_string())
    _, offsets_buffer, text_buffer = column.buffers()
    if text_buffer is None or not len(column):
        return torch.zeros(0, dtype=torch.uint8), torch.zeros(len(column) + 1, dtype=torch.int64)
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    text = np.frombuffer(text_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return torch.from_numpy(text.copy()), torch.from_numpy(offsets - offsets[0])


def packed_strings(strings: Sequence[str]) -> tuple[Tensor, Tensor]:
    """As `packed`; a few strings cost less than an Arrow array of them."""
    data = [text.encode() for text in strings]
    sizes = torch.tensor([0, *map(len, data)])
    joined = bytearray().join(data)
    text_N = (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.zeros(0, dtype=torch.uint8)
    )
    return text_N, sizes.cumsum(0)
