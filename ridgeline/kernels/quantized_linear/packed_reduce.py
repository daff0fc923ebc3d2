"""The product with packed weights in the vector units: one row of x. The ones of the codes
(codes.py) are taken out of the sum.
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
from ridgeline.kernels.skinny_linear.prologue import gained_row


@triton.jit
def packed_reduce_kernel(
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
    """One row of x a program. The next step's words and scales are loaded before this step's are
    summed, the first ones before the wait for the kernel before.

    A thread has one piece of each of its outputs' rows where BLOCK_K is a piece times the threads;
    x's values and the scales then land in the threads that use them.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    PIECE: tl.constexpr = 128 // BITS
    UNIT: tl.constexpr = 16.0 if BITS == 4 else 256.0
    KW: tl.constexpr = BLOCK_K * BITS // 32
    KC: tl.constexpr = BLOCK_K // PIECE
    one = tl.load(one_ptr)
    rows = tl.program_id(2) + tl.arange(0, 1)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    words = tl.arange(0, KW)
    in_outputs = (outputs < num_outputs)[:, None]
    # int64: a weight may have more than 2^31 words.
    gate_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride + words[None, :]
    up_ptrs = gate_ptrs + tl.cast(num_outputs, tl.int64) * weight_stride
    gates, ups = (outputs, in_outputs), (num_outputs + outputs, in_outputs)
    groups = (scale_ptr, zero_ptr, scale_stride)
    x_ptrs = x_ptr + tl.program_id(2).to(tl.int64) * x_stride
    begin = tl.program_id(1) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, depth)
    gate = load_words(gate_ptrs, in_outputs, begin, end, BITS, BLOCK_K)
    gate_scale, gate_zero = load_groups(
        groups, gates, begin, end, BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K
    )
    if GATED:
        up = load_words(up_ptrs, in_outputs, begin, end, BITS, BLOCK_K)
        up_scale, up_zero = load_groups(
            groups, ups, begin, end, BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O, KC), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_O, KC), dtype=tl.float32)
    squares = tl.zeros((KW,), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        next_gate = load_words(gate_ptrs, in_outputs, k + BLOCK_K, end, BITS, BLOCK_K)
        next_gate_scale, next_gate_zero = load_groups(
            groups, gates, k + BLOCK_K, end, BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K
        )
        if GATED:
            next_up = load_words(up_ptrs, in_outputs, k + BLOCK_K, end, BITS, BLOCK_K)
            next_up_scale, next_up_zero = load_groups(
                groups, ups, k + BLOCK_K, end, BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K
            )
        ones = tl.zeros((KW,), dtype=tl.float32)  # what the codes' ones (and zeros) add to the sum
        x_sum = tl.zeros((KW,), dtype=tl.float32)
        part = tl.zeros((BLOCK_O, KW), dtype=tl.float32)
        up_part = tl.zeros((BLOCK_O, KW), dtype=tl.float32)
        piece = k + PIECE * (words // 4)
        for byte in tl.static_range(4):
            columns = piece + words % 4 + 4 * byte * (8 // BITS)
            low = load_x(x_ptrs, columns, piece < end, EVEN)
            low, squares = gained_row(low, squares, gain_ptr, columns, depth, offset, NORM)
            moved = byte_in_mantissa(gate, byte)
            if GATED:
                up_moved = byte_in_mantissa(up, byte)
            if BITS == 4:
                high = load_x(x_ptrs, columns + 4, piece < end, EVEN)
                high, squares = gained_row(
                    high, squares, gain_ptr, columns + 4, depth, offset, NORM
                )
                low_16 = 16.0 * low
                part += high_nibble(moved, one) * high[None, :]
                part += low_nibble(moved, one) * low_16[None, :]
                if GATED:
                    up_part += high_nibble(up_moved, one) * high[None, :]
                    up_part += low_nibble(up_moved, one) * low_16[None, :]
                if ASYMMETRIC:
                    ones += low_16 + high
                    x_sum += low + high
                else:
                    ones += (16.0 + ZERO / UNIT) * low
                    ones += (1.0 + ZERO / UNIT) * high
            else:
                part += whole_byte(moved, one) * low[None, :]
                if GATED:
                    up_part += whole_byte(up_moved, one) * low[None, :]
                ones += (1.0 + ZERO / UNIT) * low
        ones = tl.sum(tl.reshape(ones, (KC, 4)), axis=1)[None, :]
        total += gate_scale * (
            tl.sum(tl.reshape(part, (BLOCK_O, KC, 4)), axis=2)
            - zero_sum(ones, x_sum, gate_zero, UNIT, KC, ASYMMETRIC)
        )
        gate, gate_scale, gate_zero = next_gate, next_gate_scale, next_gate_zero
        if GATED:
            up_total += up_scale * (
                tl.sum(tl.reshape(up_part, (BLOCK_O, KC, 4)), axis=2)
                - zero_sum(ones, x_sum, up_zero, UNIT, KC, ASYMMETRIC)
            )
            up, up_scale, up_zero = next_up, next_up_scale, next_up_zero
    all_squares = tl.zeros((1,), dtype=tl.float32) + tl.sum(squares, axis=0)
    scale_and_finish(
        (
            UNIT * tl.sum(total, axis=1)[None, :],
            UNIT * tl.sum(up_total, axis=1)[None, :],
            all_squares,
        ),
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
        1,
        BLOCK_O,
    )


@triton.jit
def load_x(pointers, columns, keep, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(pointers + columns)
    else:
        x = tl.load(pointers + columns, mask=keep, other=0.0)
    return x


@triton.jit
def zero_sum(ones, x_sum, zero, UNIT: tl.constexpr, KC: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """What a piece's sum holds beside the codes less their zero; a common zero is in `ones`."""
    if ASYMMETRIC:
        result = ones + zero * (tl.sum(tl.reshape(x_sum, (KC, 4)), axis=1)[None, :] / UNIT)
    else:
        result = ones
    return result
