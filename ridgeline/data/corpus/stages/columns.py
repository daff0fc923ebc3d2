"""Changes some rows of a column of texts and leaves the others; packs columns for kernels.

changed_where(texts, texts.str.contains("@", literal=True), scrub)
data, offsets = packed(texts)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars
import pyarrow
from numpy.typing import NDArray


def changed_where(
    texts: polars.Series, mask: polars.Series, change: Callable[[polars.Series], polars.Series]
) -> polars.Series:
    if not mask.any():
        return texts
    kept, changed = texts.filter(~mask), change(texts.filter(mask))
    places = polars.concat([mask.not_().arg_true(), mask.arg_true()])
    return polars.concat([kept, changed.alias(kept.name)]).gather(places.arg_sort())


class PackedTexts(NamedTuple):
    """Texts as kernels take them: in UTF-8, one behind the other, and where each begins."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]


def packed(texts: polars.Series) -> PackedTexts:
    column = texts.to_arrow()
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    column = column.cast(pyarrow.large_string())
    if not len(column):
        return PackedTexts(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    _, offsets, data = column.buffers()
    places = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return PackedTexts(
        np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8), places
    )
