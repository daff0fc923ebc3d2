"""What kernels that work row by row share: rows as a view, 8-bit codes of rows inside a kernel.

Imported by the `triton.py` files only: it needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """Two dims, the last one contiguous; a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


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
        # Added to 1.5 · 2^23, a value's nearest integer is the low byte of the sum, negative ones
        # too: cheaper than floor and a conversion. The nudge, a unit in the last place of the
        # largest codes, makes halves go up, as formats/scaling.py has it.
        shifted = (scaled + 2.0**-17) + 12582912.0
        codes = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    else:
        codes = scaled.to(dtype)
    return codes
