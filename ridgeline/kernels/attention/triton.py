"""What the attention kernels share: loading a tile of tokens, soft caps, the sum over values, and
what their launchers ask of their inputs.

Softmax is done in base 2, because that is the exponential the hardware has: scores are scaled by
log2(e) beforehand, and log-sum-exps are in base 2 too. Pages are laid out as kernels/pages.py says.

A tile is BLOCK tokens of one head, [BLOCK, COLUMNS]: COLUMNS is the head dim rounded up to a power
of two that `tl.dot` takes; columns past the head dim are read as zeros and never stored. Tiles
start at multiples of BLOCK, so a page of BLOCK tokens or more holds a whole tile, and its place is
one number; smaller pages give one number a token.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.pages import Pages, PageTables

MIN_COLUMNS = 16  # the least that `tl.dot` sums over
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_capped(scores, cap):
    """cap · tanh(scores / cap); an exponential that overflows gives cap, as it should."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * LOG2E / cap)))


@triton.jit
def pages_of_tile(table_ptr, start, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of each token of the tile at `start`, or the one page of all.

    Entries of the table at or past token `end` are not read: they may hold anything.
    """
    if PAGE >= BLOCK:
        pages = tl.load(table_ptr + start // PAGE, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK)
        pages = tl.load(table_ptr + tokens // PAGE, mask=tokens < end, other=0)
    return pages


@triton.jit
def places_of_tile(pages, start, head, num_heads, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tile's tokens lie, counted in rows of a head: of the first one, or of each."""
    heads = pages.to(tl.int64) * num_heads + head  # int64: offsets pass 2^31
    if PAGE >= BLOCK:
        places = heads * PAGE + start % PAGE
    else:
        places = heads * PAGE + tl.arange(0, BLOCK) % PAGE  # start is a multiple of PAGE
    return places


@triton.jit
def load_rows(
    base_ptr,
    places,
    keep,
    row_stride,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The tile itself, zero where `keep` is not (None: all are kept): rows at `places`, or with
    TOGETHER the BLOCK rows that begin at the one place.
    """
    columns = tl.arange(0, COLUMNS)
    if TOGETHER:
        inside = tl.arange(0, BLOCK)[:, None] * row_stride + columns[None, :]
        pointers = base_ptr + places * row_stride + inside
    else:
        pointers = base_ptr + places[:, None] * row_stride + columns[None, :]
    in_row = (columns < HEAD_DIM)[None, :]
    if keep is None:
        rows = tl.load(pointers) if COLUMNS == HEAD_DIM else tl.load(pointers, in_row, other=0.0)
    elif COLUMNS == HEAD_DIM:
        rows = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        rows = tl.load(pointers, mask=keep[:, None] & in_row, other=0.0)
    return rows


@triton.jit
def load_scales(base_ptr, places, keep, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    """One scale a token of the tile, zero where `keep` is not (None: all are kept)."""
    if TOGETHER:
        places = places + tl.arange(0, BLOCK)
    if keep is None:
        scales = tl.load(base_ptr + places)
    else:
        scales = tl.load(base_ptr + places, mask=keep, other=0.0)
    return scales


@triton.jit
def for_dot(x, dot_type: tl.constexpr):
    """In the dot's type, in which 8-bit codes are exact."""
    if x.dtype == tl.int8:
        x = x.to(tl.float32)  # the interpreter has no cast from integers to bf16
    return x.to(dot_type)


@triton.jit
def add_values(
    acc, total, weights, values, scales, QUANTIZED: tl.constexpr, dot_type: tl.constexpr
):
    """acc + weights · (values · scales) and total + the weights' sums; the scales are moved to the
    weights, so that codes go to the dot as they are.

    bf16 keeps eight bits of a weight. Where one token has most of the weight that error would not
    average out, so the sum is taken over what was rounded: the error then cancels in the division.
    fp16 has the bits but not the range for a small weight times a small scale: the tile's largest
    scale is taken out first.
    """
    values = for_dot(values, dot_type)
    if not QUANTIZED:
        total += tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(dot_type), values, acc, input_precision="ieee")
    elif dot_type == tl.float16:
        total += tl.sum(weights, axis=1)
        largest = tl.maximum(tl.max(scales, axis=0), 1e-20)
        weights = (weights * (scales / largest)[None, :]).to(dot_type)
        # acc in units of `largest` and back: a second accumulator would not fit in registers
        acc = tl.dot(weights, values, acc * (1.0 / largest)) * largest
    else:
        rounded = (weights * scales[None, :]).to(dot_type)
        inverse = 1.0 / tl.where(scales > 0.0, scales, 1.0)
        total += tl.sum(rounded.to(tl.float32) * inverse[None, :], axis=1)
        acc = tl.dot(rounded, values, acc, input_precision="ieee")
    return acc, total


@triton.jit
def in_half(q):
    """Queries [ROWS, COLUMNS] in fp16, each row brought near 2^15 by a power of two, and what takes
    that back [ROWS]. 8-bit codes become fp16 in one instruction, bf16 takes four.
    """
    q = q.to(tl.float32)
    exponent = (tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) >> 23) - 127
    shift = 14 - tl.minimum(tl.maximum(exponent, -100), 127)
    power = ((127 + shift) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    return (q * power[:, None]).to(tl.float16), inverse


@triton.jit
def add_codes(acc, total, unit, decay, weights, codes, scales):
    """acc · decay + weights · codes · scales in fp16, and total: as `add_values`, but acc has a
    unit that grows with the largest scale so far. That one is 2^12 of it, so that the least that
    fp16 holds of a weight times a scale is 2^-36 of the largest.
    """
    larger = tl.maximum(unit, tl.max(scales, axis=0) * (1.0 / 4096))
    acc = acc * (decay * (unit / larger))[:, None]
    total = total * decay + tl.sum(weights, axis=1)
    weights = (weights * (scales * (1.0 / larger))[None, :]).to(tl.float16)
    return tl.dot(weights, for_dot(codes, tl.float16), acc), total, larger


def heads_together(x_TNH: Tensor) -> bool:
    """Whether only the rows are apart: what the kernels ask of queries and of packed K and V."""
    return x_TNH.stride(2) == 1 and x_TNH.stride(1) == x_TNH.shape[2]


def num_columns(head_dim: int) -> int:
    """COLUMNS of a tile."""
    return max(MIN_COLUMNS, int(triton.next_power_of_2(head_dim)))


def page_arguments(pages: Pages, tables: PageTables) -> tuple[Tensor, ...]:
    """K and V, their scales, page table and lengths, in the order in which all kernels over pages
    take them; the lengths stand in for scales that there are not.
    """
    k_scale = pages.k_scale if pages.k_scale is not None else tables.lengths
    v_scale = pages.v_scale if pages.v_scale is not None else tables.lengths
    return pages.k_pages, pages.v_pages, k_scale, v_scale, tables.page_table, tables.lengths


def score_arguments(spec: AttentionSpec) -> tuple[float, ...]:
    """The scores' scale, their cap and the window, as the kernels take them one after another."""
    return float(spec.scale), float(spec.softcap or 0.0), spec.window or 0


def score_constants(spec: AttentionSpec) -> dict[str, Any]:
    return {"CAPPED": spec.softcap is not None, "WINDOWED": spec.window is not None}
