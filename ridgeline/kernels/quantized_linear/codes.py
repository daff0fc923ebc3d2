"""Codes of packed words as floats, without a conversion, and their scales.

Under the exponent of 1.0, a nibble in the top four bits of the mantissa reads as 1 + code / 16, in
the next four as 1 + code / 256, a byte in the top eight as 1 + code / 256. One shift and one and-or
do it; `one`, the bits of 1.0, is loaded (triton.py says why).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def byte_in_mantissa(words, BYTE: tl.constexpr):
    """The words moved so that their byte BYTE lies in bits 15 to 22, the top of a mantissa."""
    if BYTE == 0:
        moved = words << 15
    elif BYTE == 1:
        moved = words << 7
    elif BYTE == 2:
        moved = words >> 1
    else:
        moved = words >> 9
    return moved


@triton.jit
def low_nibble(moved, one):
    """1 + code / 256"""
    return ((moved & 0x00078000) | one).to(tl.float32, bitcast=True)


@triton.jit
def high_nibble(moved, one):
    """1 + code / 16"""
    return ((moved & 0x00780000) | one).to(tl.float32, bitcast=True)


@triton.jit
def whole_byte(moved, one):
    """1 + code / 256"""
    return ((moved & 0x007F8000) | one).to(tl.float32, bitcast=True)


@triton.jit
def load_words(pointers, in_outputs, k, end, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A step's words. What lies past the end is left as it is found: any bits read as a number from
    1 to 2, and x is zero there.
    """
    # The mask is made of pieces, so that the compiler sees it hold for four words at a time.
    in_depth = k + (128 // BITS) * (tl.arange(0, BLOCK_K * BITS // 32) // 4) < end
    return tl.load(pointers + k * BITS // 32, mask=in_outputs & in_depth[None, :])


@triton.jit
def load_groups(
    groups,
    outputs,
    k,
    end,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A step's scales and zero points in fp32, SPAN of them an output: one for a step that lies
    within a group, one a piece or one a word. Without groups they are 1 and ZERO. `groups`:
    pointers to scales and zero points, and the stride of both; `outputs`: which, and a mask.
    """
    scale_ptr, zero_ptr, stride = groups
    place_O, in_outputs = outputs
    scale = tl.full((1, 1), 1.0, dtype=tl.float32)
    zero = tl.full((1, 1), ZERO, dtype=tl.float32)
    if GROUP > 0:
        if SPAN == BLOCK_K * BITS // 32:
            depth = k + (128 // BITS) * (tl.arange(0, SPAN) // 4)
        else:
            depth = k + (BLOCK_K // SPAN) * tl.arange(0, SPAN)
        # int64: groups times outputs may pass 2^31.
        place = (depth // GROUP).to(tl.int64)[None, :] * stride + place_O[:, None]
        keep = in_outputs & (depth < end)[None, :]
        scale = tl.load(scale_ptr + place, mask=keep, other=0.0).to(tl.float32)
        if ASYMMETRIC:
            zero = tl.load(zero_ptr + place, mask=keep, other=0).to(tl.float32)
    return scale, zero
