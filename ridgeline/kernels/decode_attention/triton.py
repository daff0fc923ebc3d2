"""Decode attention in Triton: sequences are cut into splits at fixed positions, and merged after.

One program reads one split of one KV head and serves the whole group of query heads over it, so
that K and V are read once. Nothing depends on the lengths but inside the kernels: the grid comes
from the page table's width (or `max_length`), and programs past a sequence's end leave at once, so
a captured graph serves any lengths. A split begins at a multiple of `split_tokens` whatever the
batch: with that number fixed, a sequence's result does not depend on what else is in the batch.

Layouts: q_BNH with its last two dims contiguous; pages and scales contiguous (kernels/pages.py);
page_table_BM and lengths_B int32. Head dims are multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import (
    LOG2E,
    add_values,
    check_heads,
    check_pages,
    for_dot,
    heads_together,
    load_rows,
    load_scales,
    pages_of_tile,
    places_of_tile,
    soft_capped,
)
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.targets import Target


@triton.jit
def decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,  # [B, N, H], or with more than one split [B, N, NUM_SPLITS, H] in fp32
    lse_ptr,  # [B, N, NUM_SPLITS]
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
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)  # int64: offsets pass 2^31
    slot = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    first = tl.maximum(length - window, 0) if WINDOWED else 0
    split = first // split_tokens + slot
    begin = tl.maximum(split * split_tokens, first)
    end = tl.minimum(split * split_tokens + split_tokens, length)
    if not ONE_SPLIT:  # noqa: SIM102  (known to the compiler; the other is not)
        if begin >= end:
            return
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    in_q = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    inside = (head * GROUP + rows)[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + sequence * q_stride + inside, mask=in_q, other=0.0)  # [ROWS, COLUMNS]
    table_ptr += sequence * table_stride
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    TOGETHER: tl.constexpr = PAGE >= BLOCK
    start_first = begin // BLOCK * BLOCK
    # A tile's pages are fetched one tile ahead, so that its address never waits on another load.
    pages = pages_of_tile(table_ptr, start_first, end, PAGE, BLOCK)
    for start in range(start_first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keep = (tokens >= begin) & (tokens < end)
        places = places_of_tile(pages, start, head, num_kv_heads, PAGE, BLOCK)
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
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a length of zero gives zeros
    heads = (sequence * num_kv_heads + head) * GROUP + rows
    if ONE_SPLIT:
        place = heads[:, None] * HEAD_DIM + columns[None, :]
    else:
        place = (heads * num_splits + slot)[:, None] * HEAD_DIM + columns[None, :]
        lse = largest + tl.log2(total)
        tl.store(lse_ptr + heads * num_splits + slot, lse, mask=rows < GROUP)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=in_q)


@triton.jit
def merge_splits_kernel(
    partial_ptr,  # [B, N, num_splits, H], fp32
    lse_ptr,  # [B, N, num_splits], base 2
    lengths_ptr,
    out_ptr,  # [B, N, H]
    window,
    split_tokens,
    num_splits,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Each split weighs as much as its sum of exponentials; splits never written are not read."""
    sequence = tl.program_id(1).to(tl.int64)  # int64: offsets pass 2^31
    row = sequence * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths_ptr + sequence)
    first = tl.maximum(length - window, 0) if WINDOWED else 0
    num_used = tl.cdiv(length, split_tokens) - first // split_tokens
    columns = tl.arange(0, COLUMNS)
    in_row = columns < HEAD_DIM
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_used, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        used = slots < num_used
        place = row * num_splits + slots
        lse = tl.load(lse_ptr + place, mask=used, other=float("-inf"))
        partial = tl.load(
            partial_ptr + place[:, None] * HEAD_DIM + columns[None, :],
            mask=used[:, None] & in_row[None, :],
            other=0.0,
        )
        larger = tl.maximum(largest, tl.max(lse, axis=0))
        weights = tl.exp2(lse - larger)
        decay = tl.exp2(largest - larger)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(partial * weights[:, None], axis=0)
        largest = larger
    out = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty), mask=in_row)


def decode_attention(
    q_BNH: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    spec: AttentionSpec,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `tiles` what a tuner may choose."""
    check_pages(k_pages_PKSH, v_pages_PKSH, k_scale_PKS, v_scale_PKS)
    batch, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = k_pages_PKSH.shape[1:3]
    check_heads(num_heads, num_kv_heads, head_dim)
    target = target_of(q_BNH)
    tiles = tiles or choose_tiles(head_dim, k_pages_PKSH.dtype, target)
    capacity = page_table_BM.shape[1] * page_size
    longest = max(1, min(capacity, max_length if max_length is not None else capacity))
    if split_tokens is None:
        split_tokens = choose_split(batch * num_kv_heads, longest, target)
    if split_tokens % tiles.block:
        raise ValueError(f"split_tokens={split_tokens} is not a multiple of {tiles.block}")
    num_splits = count_splits(longest, split_tokens, spec.window)
    out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
    if not out_BNH.numel():
        return out_BNH
    written, lse = out_BNH, lengths_B
    if num_splits > 1:
        shape = (batch, num_heads, num_splits)
        written = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_BNH.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q_BNH.device)
    q_BNH = q_BNH if heads_together(q_BNH) else q_BNH.contiguous()
    columns = triton.next_power_of_2(head_dim)
    group = num_heads // num_kv_heads
    launch(
        decode_split_kernel,
        (num_kv_heads, batch, num_splits),
        (
            q_BNH,
            k_pages_PKSH,
            v_pages_PKSH,
            k_scale_PKS if k_scale_PKS is not None else lengths_B,
            v_scale_PKS if v_scale_PKS is not None else lengths_B,
            page_table_BM,
            lengths_B,
            written,
            lse,
            q_BNH.stride(0),
            page_table_BM.stride(0),
            num_kv_heads,
            float(spec.scale),
            float(spec.softcap or 0.0),
            spec.window or 0,
            split_tokens,
            num_splits,
        ),
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),  # 16 rows: the least a dot takes
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        PAGE=page_size,
        BLOCK=tiles.block,
        ONE_SPLIT=num_splits == 1,
        QUANTIZED=k_scale_PKS is not None,
        CAPPED=spec.softcap is not None,
        WINDOWED=spec.window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        launch(
            merge_splits_kernel,
            (num_heads, batch),
            (written, lse, lengths_B, out_BNH, spec.window or 0, split_tokens, num_splits),
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            CHUNK=min(8192 // columns, max(2, triton.next_power_of_2(num_splits))),
            WINDOWED=spec.window is not None,
            num_warps=4,
        )
    return out_BNH


def count_splits(longest: int, split_tokens: int, window: int | None) -> int:
    """How many splits the tokens one query sees can touch."""
    num_splits = triton.cdiv(longest, split_tokens)
    if window is not None:
        num_splits = min(num_splits, triton.cdiv(window - 1, split_tokens) + 1)
    return num_splits


@dataclass(frozen=True)
class Tiles:
    block: int  # tokens a tile
    num_warps: int
    num_stages: int  # tiles in flight and in use


# A heuristic until measured. To draw its share of 4.25 TB/s an SM needs about 26 KB on the way at
# any time (0.8 µs of latency): tiles of 8192 numbers (16 KB in bf16) of K and of V, one or two of
# each ahead, and two or three programs an SM are well over that. Codes have more tiles on the way,
# not larger ones: a tile is held in registers while it is cast.
TILE_NUMBERS = 8192


def choose_tiles(head_dim: int, dtype: torch.dtype, target: Target) -> Tiles:
    """By head dim and dtype alone, never by the batch: results must not depend on it."""
    block = min(128, TILE_NUMBERS // triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        block //= 2
    if target.backend == "hip":
        return Tiles(block, 4, 2)
    # Measured on an H200, 2026-11-15, heads of 128: at 64 sequences of 1024 tokens, 2 stages reach
    # 94% of read bandwidth, 3 reach 83%; with 8-bit codes 3 are best (55%), 4 reach 53%.
    return Tiles(block, 4, 3 if dtype.itemsize == 1 else 2)


# A heuristic until measured: two programs an SM fill it; a split shorter than 256 tokens spends
# its time on starting; one longer than 4096 leaves a batch waiting for its longest sequence.
PROGRAMS_PER_UNIT = 2
SHORTEST_SPLIT, LONGEST_SPLIT = 256, 4096


def choose_split(num_rows: int, longest: int, target: Target) -> int:
    """Tokens a split, for `num_rows` = sequences × KV heads."""
    wanted = triton.cdiv(PROGRAMS_PER_UNIT * target.num_units, max(num_rows, 1))
    tokens = triton.cdiv(triton.cdiv(longest, wanted), SHORTEST_SPLIT) * SHORTEST_SPLIT
    return min(tokens, LONGEST_SPLIT)
