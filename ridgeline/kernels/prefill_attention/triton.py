"""Prefill attention in Triton: packed sequences of any lengths, over pages or over packed K and V.

A program takes a tile of queries: a few tokens of one sequence with all query heads of one KV head
(so that a short chunk reads its keys once, not once a head), and walks the keys its tokens may see.
Tiles that none of them sees are skipped; only tiles that some see and others do not are masked.
Which sequence a program serves is found on the device, so the grid depends on shapes alone; the
tiles with the most keys start first.

Layouts: the last two dims of q, K and V contiguous, rows apart as they like (views of a joint
projection); pages and scales contiguous (kernels/pages.py); starts, page table and lengths
int32. Rows of q past the last start are padding and are not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import (
    LOG2E,
    add_codes,
    add_values,
    for_dot,
    heads_together,
    in_half,
    load_rows,
    load_scales,
    num_columns,
    pages_of_tile,
    places_of_tile,
    score_arguments,
    score_constants,
    soft_capped,
)
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.prefill_attention.reference import Packing
from ridgeline.kernels.targets import Target


@triton.jit
def sequence_of(tile, starts_ptr, num_sequences, TOKENS: tl.constexpr):
    """The last sequence b with starts[b] // TOKENS + b <= tile: b's tiles are numbered from there
    on, which leaves room for a last tile that is not full.
    """
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def attend(
    acc,
    total,
    largest,
    q,
    positions,
    begin,
    stop,
    first_key,
    end_key,
    first_row,
    head,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    k_stride,
    v_stride,
    num_kv_heads,
    score_scale,
    cap,
    window,
    undo,
    unit,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IN_HALF: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tiles of keys from `begin` to `stop`; without MASKED every query sees all of them. With
    IN_HALF q is `in_half`'s, with its `undo`, and acc in the `unit` of `add_codes`.
    """
    TOGETHER: tl.constexpr = (not PAGED) or PAGE >= BLOCK
    if PAGED:  # one tile ahead, so that a tile's address never waits on another load
        pages = pages_of_tile(table_ptr, begin, end_key, PAGE, BLOCK)
    for start in range(begin, stop, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = (tokens >= first_key) & (tokens < end_key) if MASKED else None
        if PAGED:
            places = places_of_tile(pages, start, head, num_kv_heads, PAGE, BLOCK)
            pages = pages_of_tile(table_ptr, start + BLOCK, end_key, PAGE, BLOCK)
        else:
            places = first_row + start
        k = load_rows(k_ptr, places, keep, k_stride, HEAD_DIM, COLUMNS, BLOCK, TOGETHER)
        scores = tl.dot(q, tl.trans(for_dot(k, q.dtype)), input_precision="ieee")
        if QUANTIZED:
            scores *= load_scales(k_scale_ptr, places, keep, BLOCK, TOGETHER)[None, :]
        if IN_HALF:
            scores *= undo[:, None]
        factor = score_scale * LOG2E
        if CAPPED:
            scores = soft_capped(scores * score_scale, cap)
            factor = LOG2E
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))  # [ROWS, BLOCK]
        larger = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        shift = larger
        if MASKED:  # a query may see nothing of a tile
            shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(largest - shift)
        v = load_rows(v_ptr, places, keep, v_stride, HEAD_DIM, COLUMNS, BLOCK, TOGETHER)
        v_scales = load_scales(v_scale_ptr, places, keep, BLOCK, TOGETHER) if QUANTIZED else None
        if IN_HALF:
            acc, total, unit = add_codes(acc, total, unit, decay, weights, v, v_scales)
        else:
            acc, total = add_values(
                acc * decay[:, None], total * decay, weights, v, v_scales, QUANTIZED, q.dtype
            )
        largest = larger
    return acc, total, largest, unit


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    num_sequences,
    num_kv_heads,
    score_scale,
    cap,
    window,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,  # queries a tile: ROWS // GROUP
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = sequence_of(tile, starts_ptr, num_sequences, TOKENS)
    first_row = tl.load(starts_ptr + sequence)
    num_new = tl.load(starts_ptr + sequence + 1) - first_row
    first_query = (tile - sequence - first_row // TOKENS) * TOKENS
    if first_query >= num_new:
        return
    first_row = first_row.to(tl.int64)  # int64: offsets pass 2^31
    first_position = first_query
    if PAGED:
        first_position += tl.load(lengths_ptr + sequence) - num_new
        table_ptr += tl.cast(sequence, tl.int64) * table_stride
    else:
        k_ptr += head * HEAD_DIM
        v_ptr += head * HEAD_DIM
    num_here = tl.minimum(num_new - first_query, TOKENS)
    last_position = first_position + num_here - 1

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    query = rows // GROUP
    positions = first_position + query
    in_tile = (query < num_here)[:, None] & (columns < HEAD_DIM)[None, :]
    token = first_row + first_query + query
    heads = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + token[:, None] * q_stride + heads, mask=in_tile, other=0.0)

    IN_HALF: tl.constexpr = QUANTIZED and q.dtype != tl.float32
    undo = 1.0
    unit = 1e-30
    if IN_HALF:
        q, undo = in_half(q)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    # Three runs of keys: up to from_full they lie behind some queries' windows, up to to_full every
    # query sees all, up to end_key they come after some queries.
    end_key = last_position + 1
    to_full = (first_position + 1) // BLOCK * BLOCK
    first_key = 0
    from_full = 0
    begin = 0
    if WINDOWED:
        first_key = tl.maximum(first_position - window + 1, 0)
        begin = first_key // BLOCK * BLOCK
        from_full = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK) * BLOCK
        from_full = tl.minimum(from_full, to_full)
    for run in tl.static_range(3):
        stop = from_full if run == 0 else (to_full if run == 1 else end_key)
        if WINDOWED or run > 0:
            acc, total, largest, unit = attend(
                acc,
                total,
                largest,
                q,
                positions,
                begin,
                stop,
                first_key,
                end_key,
                first_row,
                head,
                k_ptr,
                v_ptr,
                k_scale_ptr,
                v_scale_ptr,
                table_ptr,
                k_stride,
                v_stride,
                num_kv_heads,
                score_scale,
                cap,
                window,
                undo,
                unit,
                HEAD_DIM,
                COLUMNS,
                PAGE,
                BLOCK,
                PAGED,
                QUANTIZED,
                IN_HALF,
                CAPPED,
                WINDOWED,
                run != 1,
            )
        begin = stop
    if IN_HALF:
        acc = acc * unit
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # rows of no query stay finite
    place = token[:, None] * (num_kv_heads * GROUP * HEAD_DIM) + heads
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=in_tile)


@dataclass(frozen=True)
class KeysValues:
    """Keys and values as the kernel takes them: in pages, or packed like the queries."""

    k: Tensor
    v: Tensor
    k_stride: int  # numbers from a token's head to the next token's
    v_stride: int
    num_kv_heads: int
    tables: PageTables
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    page_size: int = 0  # 0: packed


def prefill_attention(
    q_TNH: Tensor, packing: Packing, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """The launcher over pages; arguments and result are reference.py's."""
    check_pages(pages)
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    paged = KeysValues(
        pages.k_pages,
        pages.v_pages,
        head_dim,
        head_dim,
        num_kv_heads,
        tables,
        pages.k_scale,
        pages.v_scale,
        page_size,
    )
    return _launch(q_TNH, packing, paged, spec)


def prompt_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packing: Packing, spec: AttentionSpec
) -> Tensor:
    """The launcher over packed K and V; arguments and result are reference.py's."""
    starts = packing.starts
    k_TKH = k_TKH if heads_together(k_TKH) else k_TKH.contiguous()
    v_TKH = v_TKH if heads_together(v_TKH) else v_TKH.contiguous()
    unused = PageTables(starts.unsqueeze(0), starts)
    packed = KeysValues(k_TKH, v_TKH, k_TKH.stride(0), v_TKH.stride(0), k_TKH.shape[1], unused)
    return _launch(q_TNH, packing, packed, spec)


def _launch(q_TNH: Tensor, packing: Packing, keys: KeysValues, spec: AttentionSpec) -> Tensor:
    starts, num_sequences = packing.starts, packing.num_sequences
    num_tokens, num_heads, head_dim = q_TNH.shape
    check_heads(num_heads, keys.num_kv_heads, head_dim)
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if not out_TNH.numel() or not num_sequences:
        return out_TNH
    q_TNH = q_TNH if heads_together(q_TNH) else q_TNH.contiguous()
    group = num_heads // keys.num_kv_heads
    num_rows = group * packing.most_new(num_tokens)
    paged, target = keys.page_size > 0, target_of(q_TNH)
    tiles = choose_tiles(num_rows, head_dim, keys.k.dtype, spec.window is not None, paged, target)
    check_group(group, tiles)
    tokens = tiles.rows // group
    launch(
        prefill_kernel,
        (num_tokens // tokens + num_sequences, keys.num_kv_heads),
        (
            q_TNH,
            keys.k,
            keys.v,
            keys.k_scale if keys.k_scale is not None else starts,
            keys.v_scale if keys.v_scale is not None else starts,
            keys.tables.page_table,
            keys.tables.lengths,
            starts,
            out_TNH,
            q_TNH.stride(0),
            keys.k_stride,
            keys.v_stride,
            keys.tables.page_table.stride(0),
            num_sequences,
            keys.num_kv_heads,
            *score_arguments(spec),
        ),
        **score_constants(spec),
        GROUP=group,
        TOKENS=tokens,
        ROWS=tiles.rows,
        HEAD_DIM=head_dim,
        COLUMNS=num_columns(head_dim),
        PAGE=keys.page_size or 1,
        BLOCK=tiles.block,
        PAGED=paged,
        QUANTIZED=keys.k_scale is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_TNH


def check_group(group: int, tiles: PrefillTiles) -> None:
    if group > tiles.rows:
        raise UnsupportedError(f"{group} query heads share a KV head; at most {tiles.rows} may")


@dataclass(frozen=True)
class PrefillTiles:
    rows: int  # queries × heads of a group
    block: int  # keys a tile
    num_warps: int
    num_stages: int


def choose_tiles(
    num_rows: int, head_dim: int, dtype: torch.dtype, windowed: bool, paged: bool, target: Target
) -> PrefillTiles:
    """A heuristic until measured; `num_rows` is the most a sequence has. 128 rows are two warp
    groups of 64, the matrix unit's own height on sm_90; short chunks (drafts being verified, the
    ends of prompts) take fewer. What is smaller than that elsewhere is what does not spill.
    """
    wide, codes = head_dim > 128, dtype.itemsize == 1
    rows = max(16, min(128, triton.next_power_of_2(num_rows)))
    if dtype == torch.float32:
        return PrefillTiles(min(rows, 64), 32, 4, 2)
    if target.backend == "hip":
        rows = min(rows, 64) if wide or codes else rows
        return PrefillTiles(rows, 32 if wide else 64, 4, 1 if wide else 2)
    if target.name not in ("sm_90", "sm_100"):  # matrix units that take their input from registers
        rows = min(rows, 64) if wide else rows
        num_stages = 2 if wide or target.shared_bytes < 128 * 1024 else 3
        num_warps = 8 if rows >= (64 if wide else 128) else 4
        return PrefillTiles(rows, 16 if codes else 32, num_warps, num_stages)
    if wide and (windowed or codes):
        return PrefillTiles(min(rows, 64), 16, 4, 3)
    block = 32 if wide or (windowed and codes) else 64
    if target.name == "sm_90" and rows == 128 and not (paged or wide or windowed):
        # Measured on an H200, 2026-11-15, heads of 128: 446 TFLOP/s at 8k against 403 with 64 keys
        # a tile; over pages it is the other way round, 454 against 496. On sm_100 it spills.
        block = 128
    return PrefillTiles(rows, block, 8 if rows == 128 else 4, 3)
