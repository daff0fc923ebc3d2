"""What rules on quality count in texts, in C++ (cpu.cpp), on one core.

data/corpus/stages/quality.py has the same counts as Polars expressions: they are the definition,
serve where there is no compiler and on a GPU, and the tests compare with them.

    if host_library.load("text_counts"):
        counts = count(data, offsets, classes)          # [texts, len(COLUMNS)] int64
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.kernels.byte_pairs import Bytes, CodeTable, Offsets
from ridgeline.kernels.host_library import function

OP = "text_counts"
LETTER, SPACE, UNSPACED = (
    1 << bit for bit in range(3)
)  # classes of characters, as cpu.cpp has them
COLUMNS = (
    "unspaced", "gaps", "worded", "spaces", "lines", "line_characters", "bullets", "ellipses",
    "ended_lines", "short_lines", "repeated_lines", "repeated_line_characters", "grams",
    "repeated_grams",
)  # fmt: skip


def count(data: Bytes, offsets: Offsets, classes: CodeTable) -> NDArray[np.int64]:
    """A row a text, a column for each of COLUMNS. `data` is valid UTF-8."""
    texts = len(offsets) - 1
    rows = np.empty((texts, len(COLUMNS)), dtype=np.int64)
    function(OP, "count", "pplppp")(
        data.ctypes.data,
        offsets.ctypes.data,
        texts,
        classes.index.ctypes.data,
        classes.blocks.ctypes.data,
        rows.ctypes.data,
    )
    return rows
