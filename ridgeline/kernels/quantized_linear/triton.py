"""Products with quantized weights in Triton, for 1 to 64 rows.

Weights in packed words (formats/packing.py) have the two kernels here. Codes become floats without
a conversion: under the exponent of 1.0, a nibble in the top four bits of the mantissa reads as
1 + code / 16, in the next four as 1 + code / 256, a byte in the top eight as 1 + code / 256. One
shift and one and-or do it; the ones are taken out of the sum (reduce) or by a multiply-add (dot).

8-bit weights in plain rows go through skinny_linear's kernels, which convert the codes on the way
to the matrix or vector units, or, where x is codes too, do not have to.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.packing import WORDS, ZERO
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.quantized_linear.reference import default_out, packed_bits
from ridgeline.kernels.quantized_linear.tune_space import choose_packed
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.cut import Around, Scales, launch_cut
from ridgeline.kernels.skinny_linear.triton import gained, gained_row, product, scale_and_finish
from ridgeline.kernels.skinny_linear.tune_space import Config, tune_key, tuned


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
    scale_ptr,
    zero_ptr,
    outputs,
    in_outputs,
    k,
    end,
    stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A step's scales and zero points in fp32, SPAN of them an output: one for a step that lies
    within a group, one a piece or one a word. Without groups they are 1 and ZERO.
    """
    scale = tl.full((1, 1), 1.0, dtype=tl.float32)
    zero = tl.full((1, 1), ZERO, dtype=tl.float32)
    if GROUP > 0:
        if SPAN == BLOCK_K * BITS // 32:
            depth = k + (128 // BITS) * (tl.arange(0, SPAN) // 4)
        else:
            depth = k + (BLOCK_K // SPAN) * tl.arange(0, SPAN)
        # int64: groups times outputs may pass 2^31.
        place = (depth // GROUP).to(tl.int64)[None, :] * stride + outputs[:, None]
        keep = in_outputs & (depth < end)[None, :]
        scale = tl.load(scale_ptr + place, mask=keep, other=0.0).to(tl.float32)
        if ASYMMETRIC:
            zero = tl.load(zero_ptr + place, mask=keep, other=0).to(tl.float32)
    return scale, zero


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
    ups = num_outputs + outputs
    x_ptrs = x_ptr + tl.program_id(2).to(tl.int64) * x_stride
    begin = tl.program_id(1) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, depth)
    gate = load_words(gate_ptrs, in_outputs, begin, end, BITS, BLOCK_K)
    gate_scale, gate_zero = load_groups(
        scale_ptr, zero_ptr, outputs, in_outputs, begin, end, scale_stride,
        BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K,
    )  # fmt: skip
    if GATED:
        up = load_words(up_ptrs, in_outputs, begin, end, BITS, BLOCK_K)
        up_scale, up_zero = load_groups(
            scale_ptr, zero_ptr, ups, in_outputs, begin, end, scale_stride,
            BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O, KC), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_O, KC), dtype=tl.float32)
    squares = tl.zeros((KW,), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        next_gate = load_words(gate_ptrs, in_outputs, k + BLOCK_K, end, BITS, BLOCK_K)
        next_gate_scale, next_gate_zero = load_groups(
            scale_ptr, zero_ptr, outputs, in_outputs, k + BLOCK_K, end, scale_stride,
            BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K,
        )  # fmt: skip
        if GATED:
            next_up = load_words(up_ptrs, in_outputs, k + BLOCK_K, end, BITS, BLOCK_K)
            next_up_scale, next_up_zero = load_groups(
                scale_ptr, zero_ptr, ups, in_outputs, k + BLOCK_K, end, scale_stride,
                BITS, GROUP, KC, ASYMMETRIC, ZERO, BLOCK_K,
            )  # fmt: skip
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
    scale_and_finish(
        UNIT * tl.sum(total, axis=1)[None, :],
        UNIT * tl.sum(up_total, axis=1)[None, :],
        tl.zeros((1,), dtype=tl.float32) + tl.sum(squares, axis=0),
        rows,
        outputs,
        scale_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        partial_ptr,
        counter_ptr,
        residual_stride,
        num_rows,
        num_outputs,
        depth,
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
    ups = num_outputs + outputs
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    begin = tl.program_id(1) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, depth)
    held = begin
    one = tl.load(one_ptr + tl.zeros((1, 1), dtype=tl.int32))
    if HOLD:
        held_gate = load_words(gate_ptrs, in_outputs, held, end, BITS, BLOCK_K)
        held_gate_scale, held_gate_zero = load_groups(
            scale_ptr, zero_ptr, outputs, in_outputs, held, end, scale_stride,
            BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K,
        )  # fmt: skip
        if GATED:
            held_up = load_words(up_ptrs, in_outputs, held, end, BITS, BLOCK_K)
            held_up_scale, held_up_zero = load_groups(
                scale_ptr, zero_ptr, ups, in_outputs, held, end, scale_stride,
                BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K,
            )  # fmt: skip
        begin += BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O, BLOCK_M), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_O, BLOCK_M), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # Scales are too narrow for the pipeline: each step loads those of the next.
    gate_scale, gate_zero = load_groups(
        scale_ptr, zero_ptr, outputs, in_outputs, begin, end, scale_stride,
        BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K,
    )  # fmt: skip
    up_scale, up_zero = gate_scale, gate_zero
    if GATED:
        up_scale, up_zero = load_groups(
            scale_ptr, zero_ptr, ups, in_outputs, begin, end, scale_stride,
            BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K,
        )  # fmt: skip
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        gate = load_words(gate_ptrs, in_outputs, k, end, BITS, BLOCK_K)
        next_scale, next_zero = load_groups(
            scale_ptr, zero_ptr, outputs, in_outputs, k + BLOCK_K, end, scale_stride,
            BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K,
        )  # fmt: skip
        if GATED:
            up = load_words(up_ptrs, in_outputs, k, end, BITS, BLOCK_K)
            next_up_scale, next_up_zero = load_groups(
                scale_ptr, zero_ptr, ups, in_outputs, k + BLOCK_K, end, scale_stride,
                BITS, GROUP, SPAN, ASYMMETRIC, ZERO, BLOCK_K,
            )  # fmt: skip
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
        tl.trans(total),
        tl.trans(up_total),
        squares,
        rows,
        outputs,
        scale_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        partial_ptr,
        counter_ptr,
        residual_stride,
        num_rows,
        num_outputs,
        depth,
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


def quantized_linear(
    x_MD: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zero_GO: Tensor | None = None,
    x_scale: Tensor | None = None,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
    pdl: bool = True,
) -> Tensor:
    """The launcher; arguments and result are reference.py's."""
    around = Around(bias_O, residual_MO, norm_weight_D, eps, offset, activation)
    out_dtype = out_dtype or default_out(x_MD)
    if weight.dtype == torch.int32:
        return _packed_linear(x_MD, weight, weight_scale, zero_GO, around, out_dtype, config, pdl)
    if x_MD.dtype in (torch.bfloat16, torch.float16) and x_scale is not None:
        raise UnsupportedError(f"x is {x_MD.dtype} and has a scale; only codes have one")
    if x_MD.element_size() == 1 and x_MD.dtype != weight.dtype:
        raise UnsupportedError(f"codes of {x_MD.dtype} times {weight.dtype}; they must be alike")
    scales = Scales(weight_scale, x_scale)
    return product(x_MD, weight, around, scales, out_dtype, config, pdl)


@lru_cache
def bits_of_one(device: torch.device) -> Tensor:
    """The bits of 1.0 in memory, so that the compiler does not know them: an and-or takes one
    constant only, and with two known ones a move is spent on each (a sixth of all instructions).
    The first call must come before a graph is captured, as the compilation of the kernel must.
    """
    return torch.full((1,), 0x3F800000, dtype=torch.int32, device=device)


def _packed_linear(
    x_MD: Tensor,
    weight_OW: Tensor,
    scale: Tensor,
    zero_GO: Tensor | None,
    around: Around,
    out_dtype: torch.dtype,
    config: Config | None,
    pdl: bool,
) -> Tensor:
    x_rows = as_rows(x_MD)
    num_rows, depth = x_rows.shape
    bits = packed_bits(weight_OW, depth)
    group = depth // scale.shape[0] if bits == 4 else 0
    piece = 32 // bits * WORDS
    if group % piece or (group and group * scale.shape[0] != depth):
        raise UnsupportedError(f"groups of {group} in {depth}; use 32, 64 or 128")
    assert weight_OW.stride(1) == 1, "packed rows are contiguous"
    assert scale.is_contiguous(), "scales are contiguous"
    assert group or scale.dtype == torch.float32, f"scales of channels are fp32, not {scale.dtype}"
    gated = around.activation is not None
    num_outputs = weight_OW.shape[0] // (2 if gated else 1)
    target = target_of(x_MD)
    if config is None:
        kind = f"{dtype_name(x_MD.dtype)} int{bits} g{group}"
        normed = around.norm_weight is not None
        key = tune_key(kind, num_rows, num_outputs, depth, gated, normed)
        config = tuned("quantized_linear", key, x_MD.device)
    if config is None:
        config = choose_packed(num_rows, num_outputs, depth, gated, target, bits, group)
    return launch_cut(
        packed_reduce_kernel if config.kind == "reduce" else packed_dot_kernel,
        x_rows,
        (weight_OW, scale, zero_GO, bits_of_one(x_MD.device)),
        (weight_OW.stride(0), scale.stride(0)),
        around,
        (*x_MD.shape[:-1], num_outputs),
        out_dtype,
        config,
        target,
        pdl,
        BITS=bits,
        GROUP=group,
        ASYMMETRIC=zero_GO is not None,
        ZERO=float(ZERO[bits]),
        SWAP=config.swap,
    )
