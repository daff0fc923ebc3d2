"""What kernels that work row by row share: rows as a view, 8-bit codes of rows inside a kernel.

Imported by the `triton.py` files only: it needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.targets import Target


def as_rows(x: Tensor) -> Tensor:
    """Two dims, the last one contiguous; a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def roomy(target: Target) -> dict[str, int]:
    """Options for a kernel that holds much: Blackwell's assembler gives it 64 or 72 registers and
    spills a few bytes, unless told that it may have 128 (Triton 3.6 and 3.9).
    """
    is_blackwell = target.backend == "cuda" and int(target.name.removeprefix("sm_")) >= 100
    return {"maxnreg": 128} if is_blackwell else {}


@triton.jit
def row_scale(amax: tl.tensor, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr) -> tl.tensor:
    """The scale of rows with these largest magnitudes, as formats/scaling.py defines it."""
    return tl.maximum(amax, SMALLEST_AMAX) * (1.0 / LARGEST)


@triton.jit
def to_codes(scaled: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 values already divided by their row's scale, as codes.

    Nothing is clamped: scaled by their own row's amax, values pass the format's largest by a few
    roundings of fp32 at most, and rounding takes that back.
    """
    if dtype == tl.int8:
        scaled = tl.floor(scaled + 0.5)  # a cast to int8 truncates
    return scaled.to(dtype)
