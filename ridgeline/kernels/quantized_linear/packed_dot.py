"""The product with packed weights in the matrix units: 16 to 64 rows of x. A multiply-add takes the
ones out of the codes (codes.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.quantized_linear.codes import (
    byte_in_mantissa,
    high_nibble,
    load_groups,
    load_words,
    low_nibble,
    whole_byte,
)
from ridgeline.kernels.skinny_linear.epilogue import scale_and_finish
from ridgeline.kernels.skinny_linear.prologue import gained


@triton.jit
def packed_dot_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    one_ptr,
    bias_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_stride,
    weight_stride,
    scale_stride,
    residual_stride,
    num_rows,
    num_outputs,
    depth,
    steps,
    eps,
    offset,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    SPLIT: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """16 to 64 rows. Part j of all words is one [O, K / parts] operand, multiplied with the columns
    of x it belongs to: short products, and no element changes its thread.

    8-bit codes are multiplied as they are, which is exact, and their sum is scaled. Where a step
    lies within a group so are 4-bit codes, and the step's sum is scaled; in shorter groups the
    weights are scaled, and rounded once.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    WITHIN: tl.constexpr = GROUP > 0 and GROUP % BLOCK_K == 0
    EXACT: tl.constexpr = GROUP == 0 or WITHIN
    KW: tl.constexpr = BLOCK_K * BITS // 32
    SPAN: tl.constexpr = 1 if EXACT else KW
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    words = tl.arange(0, KW)
    in_outputs = (outputs < num_outputs)[:, None]
    # int64: a weight may have more than 2^31 words.
    gate_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride + words[None, :]
    up_ptrs = gate_ptrs + tl.cast(num_outputs, tl.int64) * weight_stride
    gates, ups = (outputs, in_outputs), (num_outputs + outputs, in_outputs)
    groups = (scale_ptr, zero_ptr, scale_stride)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    begin = tl.program_id(1) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, depth)
    held = begin
    one = tl.load(one_ptr + tl.zeros((1, 1), dtype=tl.int32))
    if HOLD:
        held_gate = load_words(gate_ptrs, in_outputs, held, end, BITS, BLOCK_K)
        held_gate_scale, held_gate_zero = load_groups(
            groups, gates, held, end, BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K
        )
        if GATED:
            held_up = load_words(up_ptrs, in_outputs, held, end, BITS, BLOCK_K)
            held_up_scale, held_up_zero = load_groups(
                groups, ups, held, end, BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K
            )
        begin += BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O, BLOCK_M), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_O, BLOCK_M), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # Scales are too narrow for the pipeline: each step loads those of the next.
    gate_scale, gate_zero = load_groups(
        groups, gates, begin, end, BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K
    )
    up_scale, up_zero = gate_scale, gate_zero
    if GATED:
        up_scale, up_zero = load_groups(
            groups, ups, begin, end, BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K
        )
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        gate = load_words(gate_ptrs, in_outputs, k, end, BITS, BLOCK_K)
        next_scale, next_zero = load_groups(
            groups, gates, k + BLOCK_K, end, BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K
        )
        if GATED:
            up = load_words(up_ptrs, in_outputs, k, end, BITS, BLOCK_K)
            next_up_scale, next_up_zero = load_groups(
                groups, ups, k + BLOCK_K, end, BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K
            )
        part = tl.zeros_like(total) if WITHIN else total
        up_part = tl.zeros_like(up_total) if WITHIN else up_total
        for index in tl.static_range(32 // BITS):
            x, squares = load_columns(
                x_ptrs, gain_ptr, squares, rows, k, index, num_rows, end, depth, offset,
                NORM, BITS, BLOCK_K,
            )  # fmt: skip
            part = multiply_part(x, gate, gate_scale, gate_zero, part, one, index, EXACT, BITS)
            if GATED:
                up_part = multiply_part(x, up, up_scale, up_zero, up_part, one, index, EXACT, BITS)
        total = total + gate_scale * part if WITHIN else part
        gate_scale, gate_zero = next_scale, next_zero
        if GATED:
            up_total = up_total + up_scale * up_part if WITHIN else up_part
            up_scale, up_zero = next_up_scale, next_up_zero
    if HOLD:
        part = tl.zeros_like(total) if WITHIN else total
        up_part = tl.zeros_like(up_total) if WITHIN else up_total
        for index in tl.static_range(32 // BITS):
            x, squares = load_columns(
                x_ptrs, gain_ptr, squares, rows, held, index, num_rows, end, depth, offset,
                NORM, BITS, BLOCK_K,
            )  # fmt: skip
            part = multiply_part(
                x, held_gate, held_gate_scale, held_gate_zero, part, one, index, EXACT, BITS
            )
            if GATED:
                up_part = multiply_part(
                    x, held_up, held_up_scale, held_up_zero, up_part, one, index, EXACT, BITS
                )
        total = total + held_gate_scale * part if WITHIN else part
        if GATED:
            up_total = up_total + held_up_scale * up_part if WITHIN else up_part
    scale_and_finish(
        (tl.trans(total), tl.trans(up_total), squares),
        (rows, outputs),
        (scale_ptr, scale_ptr),
        (bias_ptr, residual_ptr, residual_stride, out_ptr),
        partial_ptr,
        counter_ptr,
        (num_rows, num_outputs, depth),
        eps,
        "none" if GROUP > 0 else "row",
        "none",
        HAS_BIAS,
        HAS_RESIDUAL,
        NORM,
        ACTIVATION,
        SPLIT,
        BLOCK_M,
        BLOCK_O,
    )


@triton.jit
def load_columns(
    x_ptrs,
    gain_ptr,
    squares,
    rows,
    k,
    INDEX: tl.constexpr,
    num_rows,
    end,
    depth,
    offset,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The columns of x that part INDEX of the words multiplies, four neighbours at a time."""
    words = tl.arange(0, BLOCK_K * BITS // 32)
    piece = k + (128 // BITS) * (words // 4)
    columns = piece + 4 * INDEX + words % 4
    keep = (rows < num_rows)[:, None] & (piece < end)[None, :]
    x = tl.load(x_ptrs + columns[None, :], mask=keep, other=0.0)
    if NORM:
        x, squares = gained(x, squares, gain_ptr, columns, depth, offset)
    return x, squares


@triton.jit
def multiply_part(
    x,
    words,
    scale,
    zero,
    total,
    one,
    INDEX: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
):
    """total [O, M] plus the weights of one part of the words times x. A multiply-add takes the one
    out of 1 + code / unit; with EXACT it leaves code - zero, else the scaled weight, which is
    rounded to x's dtype because the matrix units take that.
    """
    UNIT: tl.constexpr = 16.0 if BITS == 4 and INDEX % 2 == 1 else 256.0
    moved = byte_in_mantissa(words, INDEX * BITS // 8)
    if BITS == 8:
        value = whole_byte(moved, one)
    elif INDEX % 2 == 0:
        value = low_nibble(moved, one)
    else:
        value = high_nibble(moved, one)
    if EXACT:
        weight = value * UNIT - (UNIT + zero)
    else:
        weight = value * (UNIT * scale) - (UNIT + zero) * scale
    return tl.dot(weight.to(x.dtype), tl.trans(x), total)
