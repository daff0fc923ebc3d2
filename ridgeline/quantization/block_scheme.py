"""Weights in a GGUF file's own blocks: a scheme that no one chooses: the file has it already.

A block of 32 columns (in the K types 256) has codes of 4 to 8 bits, a scale, in some types a float
that is added, and nothing of it changes when the model is loaded. Inputs are rounded to int8 with a
scale for each 32 columns, as kernels/block_linear/reference.py defines it. Rows of a matrix may be
of several types: files mix them, and q, k and v are one matrix here.

    scheme = block_scheme([("Q4_K", 2048), ("Q6_K", 512)])
    scheme.name                             # q4_k+q6_k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.formats.gguf_blocks import block_bytes, block_size
from ridgeline.kernels.block_linear import MOST_PARTS, PANEL, TYPES
from ridgeline.quantization.scheme import Scheme

RowTypes = tuple[tuple[str, int], ...]  # a block type, and how many rows are of it


@dataclass(frozen=True)
class BlockScheme(Scheme):
    rows: RowTypes = ()

    @property
    def bits(self) -> int:
        """Of a code, of most rows."""
        largest = max(self.rows, key=lambda part: part[1])
        return {"Q8_0": 8, "Q6_K": 6}.get(largest[0], int(largest[0][1]))

    def fits(self, num_outputs: int, depth: int) -> bool:
        return num_outputs == sum(count for _, count in self.rows)

    def num_bytes(self, depth: int) -> int:
        """Of a matrix with so many columns."""
        return sum(block_bytes(kind, count * depth) for kind, count in self.rows)


def block_scheme(rows: Sequence[tuple[str, int]]) -> BlockScheme | None:
    """Of rows that follow each other; None where kernels cannot take them as one matrix."""
    joined: list[tuple[str, int]] = []
    for kind, count in rows:
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + count)
        else:
            joined.append((kind, count))
    if len(joined) > MOST_PARTS or any(count % PANEL for _, count in joined[:-1]):
        return None
    name = "+".join(dict.fromkeys(kind.lower() for kind, _ in joined))
    return BlockScheme(name, "blocks", "int8", "block", rows=tuple(joined))


def can_stay(kind: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of a file is a matrix that is multiplied as it is."""
    return kind in TYPES and len(shape) == 2 and shape[1] % block_size(kind)[0] == 0
