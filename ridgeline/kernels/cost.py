"""An op's work: the FLOPs it must do and the fewest bytes it must move, each input read once and
each output written once. The one owner of these figures; benchmark, roofline and tuner read them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpCost:
    read_bytes: float
    written_bytes: float
    flops: float = 0.0  # of the matrix units; element-wise work is left out
    matrix_dtype: str | None = None  # whose ceiling applies: "bf16", "fp8", "int8"; None: none

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes
