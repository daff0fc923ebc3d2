"""Prefill attention over pages whose bits depend on nothing but a query and its keys: the same for
a token alone (a decode row), in a prompt, or in any piece of one.

Keys come in tiles and splits at fixed positions. A split starts from nothing, and splits are put
together one after the other; whether one program walks all splits of a tile of queries or each has
a program of its own (APART) changes nothing. A tile of keys, or a split, that a query does not see
adds a weight of zero to sums multiplied by one. Queries sit in 64 rows or 128, which on sm_90 are
the same matrix instruction (see fixed_linear/tiles.py); elsewhere there is one size. The compiler
fuses no multiply-adds, which it might do in masked tiles only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import (
    heads_together,
    num_columns,
    page_arguments,
    score_arguments,
    score_constants,
)
from ridgeline.kernels.decode_attention.splits import arrival_counters
from ridgeline.kernels.deterministic_attention.splits import BUSY, SPLIT, count_splits
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.prefill_attention.reference import Packing
from ridgeline.kernels.prefill_attention.triton import (
    PrefillTiles,
    attend,
    check_group,
    choose_tiles,
    sequence_of,
)
from ridgeline.kernels.targets import Target


@triton.jit
def put_together(acc, total, largest, new_acc, new_total, new_largest):
    """Sums of weights relative to their largest scores, and the next split's, as one."""
    larger = tl.maximum(largest, new_largest)
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # neither has seen a key
    old, new = tl.exp2(largest - shift), tl.exp2(new_largest - shift)
    acc = acc * old[:, None] + new_acc * new[:, None]
    return acc, total * old + new_total * new, larger


@triton.jit
def attend_split(
    split,
    q,
    positions,
    begin,
    from_full,
    to_full,
    first_key,
    end_key,
    head,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    num_kv_heads,
    score_scale,
    cap,
    window,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One split's keys, in the three runs of prefill_kernel as far as they lie in it."""
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    low = tl.maximum(begin, split * SPLIT)
    high = tl.minimum(split * SPLIT + SPLIT, end_key)
    for run in tl.static_range(3):
        bound = from_full if run == 0 else (to_full if run == 1 else end_key)
        stop = tl.minimum(tl.maximum(bound, low), high)
        if WINDOWED or run > 0:
            acc, total, largest, _ = attend(
                acc, total, largest, q, positions, low, stop, first_key, end_key, 0, head,
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, HEAD_DIM, HEAD_DIM,
                num_kv_heads, score_scale, cap, window, 1.0, 1.0, HEAD_DIM, COLUMNS, PAGE, BLOCK,
                True, QUANTIZED, False, CAPPED, WINDOWED, run != 1,
            )  # fmt: skip
        low = stop
    return acc, total, largest


@triton.jit
def fixed_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    partial_ptr,  # [tiles, K, splits, KEPT, HEAD_DIM], fp32: sums of weighted values
    state_ptr,  # [tiles, K, splits, 2, KEPT]: sums of weights, largest scores
    counter_ptr,  # [tiles, K], zero before and after
    q_stride,
    table_stride,
    num_sequences,
    num_kv_heads,
    num_splits,
    score_scale,
    cap,
    window,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,  # queries a tile: ROWS // GROUP
    KEPT: tl.constexpr,  # rows that a tile can use at most
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    APART: tl.constexpr,
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
    first_position = first_query + tl.load(lengths_ptr + sequence) - num_new
    num_here = tl.minimum(num_new - first_query, TOKENS)
    last_position = first_position + num_here - 1
    end_key = last_position + 1
    to_full = (first_position + 1) // BLOCK * BLOCK
    first_key = 0
    from_full = 0
    if WINDOWED:
        first_key = tl.maximum(first_position - window + 1, 0)
        from_full = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK) * BLOCK
        from_full = tl.minimum(from_full, to_full)
    begin = first_key // BLOCK * BLOCK
    first_split = begin // SPLIT
    end_split = tl.cdiv(end_key, SPLIT)
    if APART:
        first_split += tl.program_id(2)
        if first_split >= end_split:
            return

    table_ptr += tl.cast(sequence, tl.int64) * table_stride
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    query = rows // GROUP
    positions = first_position + query
    in_tile = (query < num_here)[:, None] & (columns < HEAD_DIM)[None, :]
    token = first_row.to(tl.int64) + first_query + query  # int64: offsets pass 2^31
    heads = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + token[:, None] * q_stride + heads, mask=in_tile, other=0.0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in range(first_split, first_split + 1 if APART else end_split):
        new_acc, new_total, new_largest = attend_split(
            split, q, positions, begin, from_full, to_full, first_key, end_key, head,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, num_kv_heads,
            score_scale, cap, window,
            ROWS, HEAD_DIM, COLUMNS, PAGE, BLOCK, SPLIT, QUANTIZED, CAPPED, WINDOWED,
        )  # fmt: skip
        # Put together with nothing, a split stays what it is.
        acc, total, largest = put_together(acc, total, largest, new_acc, new_total, new_largest)
    if APART:
        num_used = end_split - begin // SPLIT
        index = (tl.cast(tile, tl.int64) * num_kv_heads + head) * num_splits
        if num_used > 1:
            inside = rows[:, None] * HEAD_DIM + columns[None, :]
            in_kept = (rows < KEPT)[:, None] & (columns < HEAD_DIM)[None, :]
            part = index + tl.program_id(2)
            tl.store(partial_ptr + part * (KEPT * HEAD_DIM) + inside, acc, mask=in_kept)
            tl.store(state_ptr + part * (2 * KEPT) + rows, total, mask=rows < KEPT)
            tl.store(state_ptr + part * (2 * KEPT) + KEPT + rows, largest, mask=rows < KEPT)
            tl.debug_barrier()  # every thread has stored before one of them counts the program in
            counter = counter_ptr + tile * num_kv_heads + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived < num_used - 1:
                return
            tl.store(counter, 0)  # as the next launch must find it
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            largest = tl.full((ROWS,), float("-inf"), tl.float32)
            for slot in range(num_used):
                part = index + slot  # `.cg`: other SMs wrote it, so L1 must not answer
                at, other = partial_ptr + part * (KEPT * HEAD_DIM), state_ptr + part * (2 * KEPT)
                new_acc = tl.load(at + inside, mask=in_kept, other=0.0, cache_modifier=".cg")
                new_total = tl.load(other + rows, mask=rows < KEPT, other=0.0, cache_modifier=".cg")
                new_largest = tl.load(
                    other + KEPT + rows, mask=rows < KEPT, other=0.0, cache_modifier=".cg"
                )
                acc, total, largest = put_together(
                    acc, total, largest, new_acc, new_total, new_largest
                )
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # rows of no query stay finite
    # Zero, which the compiler does not see: it would hold these places from the queries' load on.
    rows += num_here // (1 << 30)
    heads = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + columns[None, :]
    token = first_row.to(tl.int64) + first_query + rows // GROUP
    place = token[:, None] * (num_kv_heads * GROUP * HEAD_DIM) + heads
    in_tile = (rows // GROUP < num_here)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=in_tile)


def prefill_attention(
    q_TNH: Tensor,
    packing: Packing,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
    *,
    split_tokens: int = SPLIT,
    apart: bool | None = None,
) -> Tensor:
    """The launcher; arguments and result are reference.py's. Of the rest only `split_tokens`
    changes bits. Splits have programs of their own only where `max_length` bounds their number.
    """
    check_pages(pages)
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    check_heads(num_heads, num_kv_heads, head_dim)
    starts, num_sequences = packing.starts, packing.num_sequences
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if not out_TNH.numel() or not num_sequences:
        return out_TNH
    q_TNH = q_TNH if heads_together(q_TNH) else q_TNH.contiguous()
    group, target = num_heads // num_kv_heads, target_of(q_TNH)
    most_new = packing.most_new(num_tokens)
    tiles = tiles_for(group, most_new, pages, spec, split_tokens, target)
    tokens = tiles.rows // group
    num_tiles = num_tokens // tokens + num_sequences
    num_splits = count_splits(tables.longest(page_size), split_tokens, spec.window, tokens)
    if apart is None:
        programs = num_sequences * triton.cdiv(most_new, tokens) * num_kv_heads
        apart = tables.max_length is not None and programs < BUSY * target.num_units
    apart = apart and num_splits > 1
    kept = group * min(tokens, most_new)
    shape = (num_tiles, num_kv_heads, num_splits if apart else 1, kept)
    launch(
        fixed_prefill_kernel,
        (num_tiles, num_kv_heads, num_splits if apart else 1),
        (
            q_TNH,
            *page_arguments(pages, tables),
            starts,
            out_TNH,
            *memory_of_splits(out_TNH, shape, tables.lengths),
            q_TNH.stride(0),
            tables.page_table.stride(0),
            num_sequences,
            num_kv_heads,
            num_splits,
            *score_arguments(spec),
        ),
        **score_constants(spec),
        GROUP=group,
        TOKENS=tokens,
        KEPT=kept,
        ROWS=tiles.rows,
        HEAD_DIM=head_dim,
        COLUMNS=num_columns(head_dim),
        PAGE=page_size,
        BLOCK=tiles.block,
        SPLIT=split_tokens,
        APART=apart,
        QUANTIZED=pages.k_scale is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        options={"enable_fp_fusion": False},
    )
    return out_TNH


def memory_of_splits(
    out_TNH: Tensor, shape: tuple[int, int, int, int], unused: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For [tiles, KV heads, splits, rows kept]: sums of weighted values, what they weigh, and the
    counters; where there is one split, `unused`.
    """
    num_tiles, num_kv_heads, num_splits, kept = shape
    if num_splits == 1:
        return out_TNH, unused, unused
    device, head_dim = out_TNH.device, out_TNH.shape[2]
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    state = torch.empty((*shape[:3], 2, kept), dtype=torch.float32, device=device)
    return partial, state, arrival_counters(num_tiles * num_kv_heads, device)


def tiles_for(
    group: int,
    most_new: int,
    pages: Pages,
    spec: AttentionSpec,
    split_tokens: int,
    target: Target,
) -> PrefillTiles:
    """`fixed_tiles`, if they take such a group and end where splits do."""
    head_dim, windowed = pages.k_pages.shape[3], spec.window is not None
    tiles = fixed_tiles(group * most_new, head_dim, pages.k_pages.dtype, windowed, target)
    check_group(group, tiles)
    if split_tokens % tiles.block:
        raise ValueError(f"split_tokens={split_tokens} is not a multiple of {tiles.block}")
    return tiles


def fixed_tiles(
    num_rows: int, head_dim: int, dtype: torch.dtype, windowed: bool, target: Target
) -> PrefillTiles:
    """Tiles between which a query's sums stay the same: keys by dtype and heads alone, and on sm_90
    64 rows or 128, elsewhere always as many.
    """
    if target.backend == "interpreter":
        return PrefillTiles(16 if num_rows <= 16 else 32, 32, 4, 2)
    most = choose_tiles(1 << 20, head_dim, dtype, windowed, True, target)
    if head_dim > 128:  # two sums of a tile are held: more threads, or fewer rows, or it spills
        rows = 64 if target.name in ("sm_80", "sm_90") else 32
        return PrefillTiles(rows, 16 if windowed else most.block, 8 if rows == 64 else 4, 2)
    if target.name == "sm_100" and dtype != torch.float32:
        return PrefillTiles(64, min(most.block, 32), 4, 2)
    if target.name == "sm_90" and dtype != torch.float32 and num_rows <= 64 and most.rows > 64:
        return PrefillTiles(64, most.block, 4, most.num_stages)
    return most
