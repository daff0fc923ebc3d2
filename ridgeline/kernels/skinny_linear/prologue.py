"""What goes into a product: a tile of weights, and x with its norm's gain.

The gain is multiplied into x on the way in; the row's scale is applied to the sum (epilogue.py): it
is one number a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_weight(pointers, k, in_rows, columns, depth, EVEN: tl.constexpr):
    """The [O, K] tile of weights at depth k; EVEN: no edge to mask, so loads stay wide."""
    if EVEN:
        tile = tl.load(pointers + k)
    else:
        tile = tl.load(pointers + k, mask=in_rows & (k + columns < depth)[None, :], other=0.0)
    return tile


@triton.jit
def gained(x, squares, gain_ptr, columns, depth, offset):
    """x times the norm's gain, back in x's dtype for the matrix units; its squares kept in fp32."""
    gain = tl.load(gain_ptr + columns, mask=columns < depth, other=0.0).to(tl.float32) + offset
    exact = x.to(tl.float32)  # the square and the product are rounded once, not the factors
    return (exact * gain[None, :]).to(x.dtype), squares + tl.sum(exact * exact, axis=1)


@triton.jit
def gained_row(x, squares, gain_ptr, columns, depth, offset, NORM: tl.constexpr):
    """x in fp32, which the vector units work in; its gain rounded in as the dot kernel's is."""
    exact = x.to(tl.float32)
    if NORM:
        gain = tl.load(gain_ptr + columns, mask=columns < depth, other=0.0).to(tl.float32) + offset
        squares += exact * exact
        exact = (exact * gain).to(x.dtype).to(tl.float32)
    return exact, squares
