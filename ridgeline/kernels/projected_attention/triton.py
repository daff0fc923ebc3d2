"""Decode attention straight from the projection in Triton: q/k norm, rotary embedding, the write of
the newest K and V and attention are one kernel.

It is decode_attention's kernel with another beginning. Every program norms and turns its own
queries. The newest token is never read from its page: the program whose split it falls into takes
it from the projection, rounded as the page will hold it, begins its softmax with it, and writes it.
All others, and the rest of that split, are older tokens, so nothing is read that this launch
writes. What does not depend on the length is loaded before the length has come.

Layouts: rows of qkv_BC contiguous (all query heads, all K heads, all V heads); pages and scales
contiguous; page table, lengths, order int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import (
    LOG2E,
    for_dot,
    page_arguments,
    pages_of_tile,
    score_arguments,
    score_constants,
    soft_capped,
)
from ridgeline.kernels.decode_attention.splits import choose_split, count_splits
from ridgeline.kernels.decode_attention.triton import (
    DecodeTiles,
    attend_tokens,
    check_split,
    choose_tiles,
    end_split,
    memory_of_splits,
    sizes_of_tiles,
    usable_order,
)
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.projected_attention.reference import Projected
from ridgeline.kernels.rotary_pages.triton import check_projection
from ridgeline.kernels.rows import row_scale, to_codes
from ridgeline.kernels.targets import Target


@triton.jit
def load_pairs(
    ptr,  # [ROWS, 1]: where heads begin
    in_group,  # [ROWS, 1]
    TURNS: tl.constexpr,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Heads [ROWS, COLUMNS] and for each number the one it is turned with: a second load of the
    same lines costs less than an exchange between threads.

    The newest K, the angles and the norms' weights are loaded so too, the same for every row: what
    meets in arithmetic is then in one layout, and nothing goes through shared memory.
    """
    columns = tl.arange(0, COLUMNS)[None, :]
    rows = tl.load(ptr + columns, mask=in_group & (columns < HEAD_DIM), other=0.0)
    partners = rows  # stands for nothing where no one is turned
    if TURNS:
        beside = tl.where(columns < ANGLES, columns + ANGLES, columns - ANGLES)
        partners = tl.load(ptr + beside, mask=in_group & (columns < 2 * ANGLES), other=0.0)
    return rows, partners


@triton.jit
def load_angles(ptr, in_group, beyond, ANGLES: tl.constexpr, COLUMNS: tl.constexpr):
    """cos or sin for each number [ROWS, COLUMNS]; `beyond` for those that no angle turns."""
    columns = tl.arange(0, COLUMNS)[None, :]
    angles = tl.where(columns < ANGLES, columns, columns - ANGLES)
    return tl.load(ptr + angles, mask=in_group & (columns < 2 * ANGLES), other=beyond)


@triton.jit
def normed(rows, partners, weights, partner_weights, eps, offset, HEAD_DIM: tl.constexpr):
    """fp32 in; numbers past the head dim are zero and stay so."""
    scale = tl.rsqrt(tl.sum(rows * rows, axis=1, keep_dims=True) / HEAD_DIM + eps)
    rows = rows * scale * (weights.to(tl.float32) + offset)
    return rows, partners * scale * (partner_weights.to(tl.float32) + offset)


@triton.jit
def as_held(x, dtype: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr):
    """Heads in fp32 as a page of `dtype` holds them, and their scales [ROWS]."""
    if LARGEST > 0:
        scales = row_scale(tl.max(tl.abs(x), axis=1), LARGEST, SMALLEST_AMAX)
        held = to_codes(x * (1.0 / scales)[:, None], dtype)
    else:
        scales = 1.0  # stands for nothing; no one reads it
        held = x.to(dtype)
    return held, scales


@triton.jit
def projected_attention_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lengths_ptr,
    order_ptr,  # [B]
    out_ptr,  # [B, N, H]
    partial_ptr,  # [B, K, num_splits, GROUP, H], fp32
    lse_ptr,  # [B, K, num_splits, GROUP]
    counter_ptr,  # [B, K], zero before and after
    qkv_stride,
    table_stride,
    num_kv_heads,
    eps,
    offset,
    score_scale,
    cap,
    window,
    split_tokens,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ANGLES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    NORMED: tl.constexpr,
    TURNS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ORDERED: tl.constexpr,
):
    QUANTIZED: tl.constexpr = LARGEST > 0
    head = tl.program_id(0)
    sequence = tl.load(order_ptr + tl.program_id(1)) if ORDERED else tl.program_id(1)
    sequence = sequence.to(tl.int64)  # int64: offsets pass 2^31
    slot = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    written_to = tl.load(slots_ptr + sequence).to(tl.int64)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    in_group = (rows < GROUP)[:, None]
    same = tl.zeros((ROWS, 1), tl.int32)  # a place for every row, the same one
    qkv_ptr += sequence * qkv_stride
    heads = (head * GROUP + rows)[:, None] * HEAD_DIM
    q, q_beside = load_pairs(qkv_ptr + heads, in_group, TURNS, ANGLES, HEAD_DIM, COLUMNS)
    k_start = (num_kv_heads * GROUP + head) * HEAD_DIM
    k, k_beside = load_pairs(qkv_ptr + k_start + same, in_group, TURNS, ANGLES, HEAD_DIM, COLUMNS)
    v_start = k_start + num_kv_heads * HEAD_DIM
    v = tl.load(qkv_ptr + v_start + columns, mask=columns < HEAD_DIM, other=0.0)  # [1, COLUMNS]
    if TURNS:
        angles = sequence * ANGLES + same
        cos = load_angles(cos_ptr + angles, in_group, 1.0, ANGLES, COLUMNS)
        sin = load_angles(sin_ptr + angles, in_group, 0.0, ANGLES, COLUMNS)
    if NORMED:
        q_gain, q_gain_beside = load_pairs(
            q_norm_ptr + same, in_group, TURNS, ANGLES, HEAD_DIM, COLUMNS
        )
        k_gain, k_gain_beside = load_pairs(
            k_norm_ptr + same, in_group, TURNS, ANGLES, HEAD_DIM, COLUMNS
        )

    first = tl.maximum(length - window, 0) if WINDOWED else 0
    split = first // split_tokens + slot
    begin = tl.maximum(split * split_tokens, first)
    end = tl.minimum(split * split_tokens + split_tokens, length)
    older = tl.minimum(end, length - 1)  # where the tokens end that are in the pages
    table_ptr += sequence * table_stride
    pages = pages_of_tile(table_ptr, begin // BLOCK * BLOCK, older, PAGE, BLOCK)
    if not ONE_SPLIT:  # noqa: SIM102  (known to the compiler; the other is not)
        if begin >= end and slot > 0:  # the first one stays: a length of zero gives zeros
            return
    has_newest = (end == length) & (begin < end)

    # fp32 from load to rounding, as rotary_pages has it.
    dot_type: tl.constexpr = q.dtype
    q, q_beside = q.to(tl.float32), q_beside.to(tl.float32)
    k, k_beside = k.to(tl.float32), k_beside.to(tl.float32)
    if NORMED:
        q, q_beside = normed(q, q_beside, q_gain, q_gain_beside, eps, offset, HEAD_DIM)
        k, k_beside = normed(k, k_beside, k_gain, k_gain_beside, eps, offset, HEAD_DIM)
    if TURNS:
        sin = tl.where(columns < ANGLES, -sin, sin)
        q = q * cos + q_beside * sin
        k = k * cos + k_beside * sin
    q = q.to(dot_type)
    k, k_scales = as_held(k, k_ptr.dtype.element_ty, LARGEST, SMALLEST_AMAX)
    v, v_scale = as_held(v.to(tl.float32), v_ptr.dtype.element_ty, LARGEST, SMALLEST_AMAX)

    place = (written_to // PAGE * num_kv_heads + head) * PAGE + written_to % PAGE
    written_to = tl.where(has_newest, written_to, -1)
    # Of K the first of its equal rows. Compared as tensors: the interpreter makes none of a bool.
    one, in_head = tl.arange(0, 1), columns < HEAD_DIM
    kept, kept_v = (rows == 0) & (rows + written_to >= 0), one + written_to >= 0
    k_place, v_place = place + rows, place + one
    tl.store(k_ptr + k_place[:, None] * HEAD_DIM + columns, k, mask=kept[:, None] & in_head)
    tl.store(v_ptr + v_place[:, None] * HEAD_DIM + columns, v, mask=kept_v[:, None] & in_head)
    if QUANTIZED:
        tl.store(k_scale_ptr + k_place, k_scales, mask=kept)
        tl.store(v_scale_ptr + v_place, v_scale, mask=kept_v)

    # The softmax begins with the newest token, of weight one, or with nothing.
    products = q.to(tl.float32) * for_dot(k, dot_type).to(tl.float32)
    scores = tl.sum(products, axis=1) * score_scale  # [ROWS]
    v = for_dot(v, dot_type).to(tl.float32)
    if QUANTIZED:
        scores *= k_scales
        v *= v_scale[:, None]
    if CAPPED:
        scores = soft_capped(scores, cap)
    largest = tl.where(has_newest, scores * LOG2E, float("-inf"))
    total = tl.zeros((ROWS,), tl.float32) + tl.where(has_newest, 1.0, 0.0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32) + tl.where(has_newest, v, 0.0)
    largest, total, acc = attend_tokens(
        q,
        largest,
        total,
        acc,
        k_ptr,
        v_ptr,
        k_scale_ptr,
        v_scale_ptr,
        table_ptr,
        pages,
        begin,
        older,
        head,
        num_kv_heads,
        score_scale,
        cap,
        HEAD_DIM,
        COLUMNS,
        PAGE,
        BLOCK,
        QUANTIZED,
        CAPPED,
    )
    end_split(
        largest,
        total,
        acc,
        out_ptr,
        partial_ptr,
        lse_ptr,
        counter_ptr,
        sequence * num_kv_heads + head,
        slot,
        tl.cdiv(length, split_tokens) - first // split_tokens,
        num_splits,
        GROUP,
        ROWS,
        GROUP_ROWS,
        HEAD_DIM,
        COLUMNS,
        CHUNK,
        ONE_SPLIT,
    )


@dataclass(frozen=True)
class Fused:
    """How the one kernel cuts its work: a tile's tokens, and how long a split is; None:
    `choose_split`'s.
    """

    block: int
    num_warps: int
    num_stages: int
    split: int | None = None

    @property
    def tiles(self) -> DecodeTiles:
        return DecodeTiles(self.block, self.num_warps, self.num_stages)


def projected_attention(
    rows: Projected, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `run.config` is a Fused."""
    (qkv_BC, angles, slots_B, norm), config = rows, run.config
    check_pages(pages)
    check_projection(qkv_BC, slots_B, pages)
    batch, (num_kv_heads, page_size, head_dim) = qkv_BC.shape[0], pages.k_pages.shape[1:]
    num_heads = qkv_BC.shape[1] // head_dim - 2 * num_kv_heads
    check_heads(num_heads, num_kv_heads, head_dim)
    target = target_of(qkv_BC)
    tiles = config.tiles if config else choose_tiles(head_dim, pages.k_pages.dtype, target)
    longest = tables.longest(page_size)
    split_tokens = run.split_tokens
    if split_tokens is None:
        split_tokens = choose_split(batch * num_kv_heads, longest, target)
        split_tokens = config.split if config and config.split else split_tokens
    check_split(split_tokens, tiles)
    num_splits = count_splits(longest, split_tokens, spec.window)
    out_BNH = torch.empty((batch, num_heads, head_dim), dtype=qkv_BC.dtype, device=qkv_BC.device)
    if not out_BNH.numel():
        return out_BNH
    order = usable_order(tables, batch * num_kv_heads, target)
    launch(
        projected_attention_kernel,
        (num_kv_heads, batch, num_splits),
        (
            qkv_BC,
            angles[0].contiguous() if angles is not None else qkv_BC,
            angles[1].contiguous() if angles is not None else qkv_BC,
            norm.q_weight if norm is not None else qkv_BC,
            norm.k_weight if norm is not None else qkv_BC,
            slots_B,
            *page_arguments(pages, tables),
            order if order is not None else tables.lengths,
            out_BNH,
            *memory_of_splits(out_BNH, num_kv_heads, num_splits, tables.lengths),
            qkv_BC.stride(0),
            tables.page_table.stride(0),
            num_kv_heads,
            float(norm.eps) if norm is not None else 1e-6,
            float(norm.offset) if norm is not None else 0.0,
            *score_arguments(spec),
            split_tokens,
            num_splits,
        ),
        **sizes_of_tiles(num_heads // num_kv_heads, head_dim, tiles.block, num_splits),
        **score_constants(spec),
        ANGLES=angles[0].shape[-1] if angles is not None else 0,
        PAGE=page_size,
        LARGEST=LARGEST.get(pages.k_pages.dtype, 0.0),
        SMALLEST_AMAX=SMALLEST_AMAX,
        NORMED=norm is not None,
        TURNS=angles is not None,
        ORDERED=order is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_BNH


def configs(
    num_rows: int, longest: int, head_dim: int, dtype: torch.dtype, target: Target
) -> list[Fused]:
    """Worth timing, `num_rows` = sequences × KV heads: the heuristic's tiles, and where that leaves
    SMs without a program also shorter splits, which end sooner and leave more to merge.
    """
    tiles = choose_tiles(head_dim, dtype, target)
    shortest = choose_split(num_rows, longest, target) // 2
    splits: list[int | None] = [None]
    while shortest >= tiles.block and num_rows * (longest // (2 * shortest)) < target.num_units:
        splits.append(shortest)
        shortest //= 2
    return [
        Fused(tiles.block, tiles.num_warps, num_stages, split)
        for num_stages in (tiles.num_stages, tiles.num_stages + 1)
        for split in splits
    ]
