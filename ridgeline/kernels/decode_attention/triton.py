"""Decode attention in Triton: sequences are cut into splits at fixed positions, and the last split
of a sequence to finish merges them all, in their order: one kernel.

One program reads one split of one KV head and serves the whole group of query heads over it, so
that K and V are read once. Nothing depends on the lengths but inside the kernel: the grid comes
from the page table's width (or `max_length`), and programs past a sequence's end leave at once, so
a captured graph serves any lengths. A split begins at a multiple of `split_tokens` whatever the
batch: with that number fixed, a sequence's result does not depend on what else is in the batch.

Layouts: q_BNH with its last two dims contiguous; pages and scales contiguous (kernels/pages.py);
page table, lengths and order int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import (
    LOG2E,
    add_values,
    for_dot,
    heads_together,
    load_rows,
    load_scales,
    num_columns,
    page_arguments,
    pages_of_tile,
    places_of_tile,
    score_arguments,
    score_constants,
    soft_capped,
)
from ridgeline.kernels.decode_attention.splits import (
    PROGRAMS_PER_UNIT,
    arrival_counters,
    choose_split,
    count_splits,
)
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.targets import Target


@triton.jit
def merge_splits(
    partial_ptr,  # [splits, GROUP, HEAD_DIM], fp32, of one KV head of one sequence
    lse_ptr,  # [splits, GROUP], base 2
    out_ptr,  # [GROUP, HEAD_DIM]
    num_used,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each split weighs as much as its sum of exponentials; splits never written are not read.
    `.cg`: other SMs wrote them, so L1 must not answer.
    """
    rows = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows[:, None] * HEAD_DIM + columns[None, :]
    in_group = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    largest = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, COLUMNS), tl.float32)
    for start in range(0, num_used, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        used = slots < num_used
        lse = tl.load(
            lse_ptr + slots[:, None] * GROUP + rows[None, :],
            mask=used[:, None] & (rows < GROUP)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )  # [CHUNK, GROUP_ROWS]
        partial = tl.load(
            partial_ptr + slots[:, None, None] * (GROUP * HEAD_DIM) + inside[None, :, :],
            mask=used[:, None, None] & in_group[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [CHUNK, GROUP_ROWS, COLUMNS]
        larger = tl.maximum(largest, tl.max(lse, axis=0))
        # Rows beyond the group have no maximum: 0 instead keeps NaN out of them.
        against = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(lse - against[None, :])
        decay = tl.exp2(largest - against)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
        largest = larger
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + inside, out.to(out_ptr.dtype.element_ty), mask=in_group)


@triton.jit
def attend_tokens(
    q,  # [ROWS, COLUMNS]
    largest,  # [ROWS]: the softmax so far, as are total [ROWS] and acc [ROWS, COLUMNS]
    total,
    acc,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,  # the sequence's line
    pages,  # of the first tile
    begin,
    end,
    head,
    num_kv_heads,
    score_scale,
    cap,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The softmax gone on over tokens `begin` to `end` of the pages. There may be none, if it has
    one already: a tile with all of its tokens hidden would make NaN of a maximum of -inf.
    """
    TOGETHER: tl.constexpr = PAGE >= BLOCK
    for start in range(begin // BLOCK * BLOCK, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = (tokens >= begin) & (tokens < end)
        places = places_of_tile(pages, start, head, num_kv_heads, PAGE, BLOCK)
        # A tile's pages are fetched one tile ahead, so that no address waits on another load.
        pages = pages_of_tile(table_ptr, start + BLOCK, end, PAGE, BLOCK)
        k = load_rows(k_ptr, places, keep, HEAD_DIM, HEAD_DIM, COLUMNS, BLOCK, TOGETHER)
        scores = tl.dot(q, tl.trans(for_dot(k, q.dtype)), input_precision="ieee") * score_scale
        if QUANTIZED:
            scores *= load_scales(k_scale_ptr, places, keep, BLOCK, TOGETHER)[None, :]
        if CAPPED:
            scores = soft_capped(scores, cap)
        scores = tl.where(keep[None, :], scores * LOG2E, float("-inf"))  # [ROWS, BLOCK]
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - larger[:, None])
        decay = tl.exp2(largest - larger)
        v = load_rows(v_ptr, places, keep, HEAD_DIM, HEAD_DIM, COLUMNS, BLOCK, TOGETHER)
        v_scales = load_scales(v_scale_ptr, places, keep, BLOCK, TOGETHER) if QUANTIZED else None
        acc, total = add_values(
            acc * decay[:, None], total * decay, weights, v, v_scales, QUANTIZED, q.dtype
        )
        largest = larger
    return largest, total, acc


@triton.jit
def end_split(
    largest,
    total,
    acc,
    out_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    index,  # of the sequence's KV head among all
    slot,
    num_used,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    """The output, if this split is all there is; else its part of it, and the last to come merges
    them.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows[:, None] * HEAD_DIM + columns[None, :]
    in_group = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a length of zero gives zeros
    num_used = 1 if ONE_SPLIT else num_used  # known to the compiler
    if num_used <= 1:
        place = index * GROUP * HEAD_DIM + inside
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=in_group)
    else:
        part = (index * num_splits + slot) * GROUP
        tl.store(partial_ptr + part * HEAD_DIM + inside, out, mask=in_group)
        tl.store(lse_ptr + part + rows, largest + tl.log2(total), mask=rows < GROUP)
        tl.debug_barrier()  # every thread has stored before one of them counts the program in
        arrived = tl.atomic_add(counter_ptr + index, 1, sem="acq_rel", scope="gpu")
        if arrived == num_used - 1:
            tl.store(counter_ptr + index, 0)  # as the next launch must find it
            merge_splits(
                partial_ptr + index * num_splits * GROUP * HEAD_DIM,
                lse_ptr + index * num_splits * GROUP,
                out_ptr + index * GROUP * HEAD_DIM,
                num_used,
                GROUP,
                GROUP_ROWS,
                HEAD_DIM,
                COLUMNS,
                CHUNK,
            )


@triton.jit
def decode_attention_kernel(
    q_ptr,
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
    q_stride,
    table_stride,
    num_kv_heads,
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
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ORDERED: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.load(order_ptr + tl.program_id(1)) if ORDERED else tl.program_id(1)
    sequence = sequence.to(tl.int64)  # int64: offsets pass 2^31
    slot = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    first = tl.maximum(length - window, 0) if WINDOWED else 0
    split = first // split_tokens + slot
    begin = tl.maximum(split * split_tokens, first)
    end = tl.minimum(split * split_tokens + split_tokens, length)
    if not ONE_SPLIT:  # noqa: SIM102  (known to the compiler; the other is not)
        if begin >= end and slot > 0:  # the first one stays: a length of zero gives zeros
            return
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    in_q = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    inside = (head * GROUP + rows)[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + sequence * q_stride + inside, mask=in_q, other=0.0)  # [ROWS, COLUMNS]
    table_ptr += sequence * table_stride
    pages = pages_of_tile(table_ptr, begin // BLOCK * BLOCK, end, PAGE, BLOCK)
    largest, total, acc = attend_tokens(
        q,
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, COLUMNS), tl.float32),
        k_ptr,
        v_ptr,
        k_scale_ptr,
        v_scale_ptr,
        table_ptr,
        pages,
        begin,
        end,
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


def decode_attention(
    q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `run.config` is a DecodeTiles."""
    check_pages(pages)
    batch, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    check_heads(num_heads, num_kv_heads, head_dim)
    target = target_of(q_BNH)
    tiles = run.config or choose_tiles(head_dim, pages.k_pages.dtype, target)
    longest = tables.longest(page_size)
    split_tokens = run.split_tokens
    if split_tokens is None:
        split_tokens = choose_split(batch * num_kv_heads, longest, target)
    check_split(split_tokens, tiles)
    num_splits = count_splits(longest, split_tokens, spec.window)
    out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
    if not out_BNH.numel():
        return out_BNH
    q_BNH = q_BNH if heads_together(q_BNH) else q_BNH.contiguous()
    order = usable_order(tables, batch * num_kv_heads, target)
    launch(
        decode_attention_kernel,
        (num_kv_heads, batch, num_splits),
        (
            q_BNH,
            *page_arguments(pages, tables),
            order if order is not None else tables.lengths,
            out_BNH,
            *memory_of_splits(out_BNH, num_kv_heads, num_splits, tables.lengths),
            q_BNH.stride(0),
            tables.page_table.stride(0),
            num_kv_heads,
            *score_arguments(spec),
            split_tokens,
            num_splits,
        ),
        **sizes_of_tiles(num_heads // num_kv_heads, head_dim, tiles.block, num_splits),
        **score_constants(spec),
        PAGE=page_size,
        QUANTIZED=pages.k_scale is not None,
        ORDERED=order is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_BNH


def check_split(split_tokens: int, tiles: DecodeTiles) -> None:
    if split_tokens % tiles.block:
        raise ValueError(f"split_tokens={split_tokens} is not a multiple of {tiles.block}")


def usable_order(tables: PageTables, num_rows: int, target: Target) -> Tensor | None:
    """Where all programs start at once no order helps, and reading it would only take time."""
    return tables.order if num_rows > PROGRAMS_PER_UNIT * target.num_units else None


def memory_of_splits(
    out_BNH: Tensor, num_kv_heads: int, num_splits: int, unused: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of the output, their weights and the counters; where there is one split, `unused`."""
    if num_splits == 1:
        return out_BNH, unused, unused
    batch, num_heads, head_dim = out_BNH.shape
    shape, device = (batch, num_kv_heads, num_splits, num_heads // num_kv_heads), out_BNH.device
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    return partial, lse, arrival_counters(batch * num_kv_heads, device)


def sizes_of_tiles(group: int, head_dim: int, block: int, num_splits: int) -> dict[str, Any]:
    """The constants of a kernel that follow from how the work is cut."""
    columns, group_rows = num_columns(head_dim), int(triton.next_power_of_2(group))
    return {
        "GROUP": group,
        "ROWS": max(16, group_rows),  # 16 rows: the least a dot takes
        "GROUP_ROWS": group_rows,
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "BLOCK": block,
        "CHUNK": merged_at_once(num_splits, group_rows * columns),
        "ONE_SPLIT": num_splits == 1,
    }


def merged_at_once(num_splits: int, numbers: int) -> int:
    """Splits in a chunk of the merge: few enough to be held in registers, `numbers` each."""
    return min(max(1, 8192 // numbers), triton.next_power_of_2(num_splits))


@dataclass(frozen=True)
class DecodeTiles:
    block: int  # tokens a tile
    num_warps: int
    num_stages: int  # tiles in flight and in use


# A heuristic until measured. To draw its share of 4.25 TB/s an SM needs about 26 KB on the way at
# any time (0.8 µs of latency): tiles of 8192 numbers (16 KB in bf16) of K and of V, one or two of
# each ahead, and two or three programs an SM are well over that. Codes have more tiles on the way,
# not larger ones: a tile is held in registers while it is cast.
TILE_NUMBERS = 8192


def choose_tiles(head_dim: int, dtype: torch.dtype, target: Target) -> DecodeTiles:
    """By head dim and dtype alone, never by the batch: results must not depend on it."""
    block = min(128, TILE_NUMBERS // num_columns(head_dim))
    if dtype == torch.float32:
        block //= 2
    if target.backend == "hip":
        return DecodeTiles(block, 4, 2)
    # Measured on an H200, 2026-11-15, heads of 128: at 64 sequences of 1024 tokens, 2 stages reach
    # 94% of read bandwidth, 3 reach 83%; with 8-bit codes 3 are best (55%), 4 reach 53%.
    return DecodeTiles(block, 4, 3 if dtype.itemsize == 1 else 2)
