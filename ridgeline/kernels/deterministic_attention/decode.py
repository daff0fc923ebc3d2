"""Decode rows: one query a sequence, the same bits as that query in any prompt (triton.py).

What a row has to itself makes it cheaper than a prompt of one token: no search for its sequence,
one run of keys instead of three (a mask that hides nothing changes no bit), the longest sequences
first, and splits always apart: what is kept of one is a hundredth of its keys, so programs of equal
size cost less than one that holds two sums. Splits are triton.py's, put together in its order.

    decode_rows(q, pages, tables, spec)
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
from ridgeline.kernels.deterministic_attention.splits import (
    MOST_PARTIAL,
    SPLIT,
    count_parts,
    count_splits,
    partial_bytes,
)
from ridgeline.kernels.deterministic_attention.triton import (
    memory_of_splits,
    put_together,
    tiles_for,
)
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.prefill_attention.triton import attend


@triton.jit
def merge_splits(
    partial_ptr,
    state_ptr,
    out_ptr,
    num_used,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All splits of a sequence's KV head, in their order; `.cg`: other SMs wrote them."""
    rows = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows[:, None] * HEAD_DIM + columns[None, :]
    in_group = rows < GROUP
    keep = in_group[:, None] & (columns < HEAD_DIM)[None, :]
    acc = tl.zeros((GROUP_ROWS, COLUMNS), tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    largest = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    for slot in range(num_used):
        at, other = partial_ptr + slot * (GROUP * HEAD_DIM), state_ptr + slot * (2 * GROUP) + rows
        new_acc = tl.load(at + inside, mask=keep, other=0.0, cache_modifier=".cg")
        new_total = tl.load(other, mask=in_group, other=0.0, cache_modifier=".cg")
        new_largest = tl.load(other + GROUP, mask=in_group, other=0.0, cache_modifier=".cg")
        acc, total, largest = put_together(acc, total, largest, new_acc, new_total, new_largest)
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + inside, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def fixed_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lengths_ptr,
    order_ptr,
    out_ptr,  # [B, N, H]
    partial_ptr,  # [B, K, splits, GROUP, HEAD_DIM], fp32: sums of weighted values
    state_ptr,  # [B, K, splits, 2, GROUP]: sums of weights, largest scores
    counter_ptr,  # [B, K], zero before and after
    q_stride,
    table_stride,
    num_kv_heads,
    num_splits,
    score_scale,
    cap,
    window,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Programs: KV heads x sequences x parts; a part takes every so-manieth split."""
    head = tl.program_id(0)
    part = tl.program_id(2)
    sequence = tl.load(order_ptr + tl.program_id(1)).to(tl.int64)  # int64: offsets pass 2^31
    end_key = tl.load(lengths_ptr + sequence)
    position = end_key - 1
    first_key = tl.maximum(position - window + 1, 0) if WINDOWED else 0
    first_split = first_key // BLOCK * BLOCK // SPLIT
    num_used = tl.maximum(tl.cdiv(end_key, SPLIT) - first_split, 1)  # padding may have no keys
    if not ONE_SPLIT:  # noqa: SIM102  (known to the compiler; the other is not)
        if part >= num_used:
            return
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows[:, None] * HEAD_DIM + columns[None, :]
    in_group = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    own = (sequence * num_kv_heads + head) * (GROUP * HEAD_DIM)
    q_place = sequence * q_stride + head * (GROUP * HEAD_DIM) + inside
    q = tl.load(q_ptr + q_place, mask=in_group, other=0.0)
    table_ptr += sequence * table_stride
    index = (sequence * num_kv_heads + head) * num_splits
    for slot in range(part, 1 if ONE_SPLIT else num_used, tl.num_programs(2)):
        split = first_split + slot
        acc, total, largest, _ = attend(
            tl.zeros((ROWS, COLUMNS), tl.float32),
            tl.zeros((ROWS,), tl.float32),
            tl.full((ROWS,), float("-inf"), tl.float32),
            q,
            tl.zeros((ROWS,), tl.int32) + position,
            tl.maximum(first_key // BLOCK * BLOCK, split * SPLIT),
            tl.minimum(split * SPLIT + SPLIT, end_key),
            first_key, end_key, 0, head,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, HEAD_DIM, HEAD_DIM,
            num_kv_heads, score_scale, cap, window, 1.0, 1.0, HEAD_DIM, COLUMNS, PAGE, BLOCK,
            True, QUANTIZED, False, CAPPED, WINDOWED, True,
        )  # fmt: skip
        if ONE_SPLIT:
            out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # rows of no query stay finite
            tl.store(out_ptr + own + inside, out.to(out_ptr.dtype.element_ty), mask=in_group)
        else:
            state = state_ptr + (index + slot) * (2 * GROUP) + rows
            tl.store(partial_ptr + (index + slot) * (GROUP * HEAD_DIM) + inside, acc, mask=in_group)
            tl.store(state, total, mask=rows < GROUP)
            tl.store(state + GROUP, largest, mask=rows < GROUP)
    if not ONE_SPLIT:
        tl.debug_barrier()  # every thread has stored before one of them counts the program in
        counter = counter_ptr + sequence * num_kv_heads + head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.minimum(num_used, tl.num_programs(2)) - 1:
            tl.store(counter, 0)  # as the next launch must find it
            merge_splits(
                partial_ptr + index * (GROUP * HEAD_DIM), state_ptr + index * (2 * GROUP),
                out_ptr + own, num_used, GROUP, GROUP_ROWS, HEAD_DIM, COLUMNS,
            )  # fmt: skip


def fits(
    q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec, split_tokens: int
) -> bool:
    """Whether the splits' sums may be kept: thousands of rows of long contexts would take memory
    that pages should have.
    """
    longest = tables.longest(pages.k_pages.shape[2])
    num_splits = count_splits(longest, split_tokens, spec.window, 1)
    return partial_bytes(q_BNH.shape[1], q_BNH.shape[2], len(q_BNH), num_splits) <= MOST_PARTIAL


def decode_rows(
    q_BNH: Tensor,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
    *,
    split_tokens: int = SPLIT,
    parts: int | None = None,
) -> Tensor:
    """The launcher. `parts`, the programs that share a row's splits, is chosen where it is not
    given. Only `split_tokens` changes bits.
    """
    check_pages(pages)
    batch, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    check_heads(num_heads, num_kv_heads, head_dim)
    out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
    if not out_BNH.numel():
        return out_BNH
    q_BNH = q_BNH if heads_together(q_BNH) else q_BNH.contiguous()
    order = tables.order
    if order is None:
        order = torch.arange(batch, dtype=torch.int32, device=q_BNH.device)
    group, target = num_heads // num_kv_heads, target_of(q_BNH)
    tiles = tiles_for(group, 1, pages, spec, split_tokens, target)
    num_splits = count_splits(tables.longest(page_size), split_tokens, spec.window, 1)
    parts = parts or count_parts(batch * num_kv_heads, num_splits, target.num_units)
    launch(
        fixed_decode_kernel,
        (num_kv_heads, batch, parts),
        (
            q_BNH,
            *page_arguments(pages, tables),
            order,
            out_BNH,
            *memory_of_splits(out_BNH, (batch, num_kv_heads, num_splits, group), tables.lengths),
            q_BNH.stride(0),
            tables.page_table.stride(0),
            num_kv_heads,
            num_splits,
            *score_arguments(spec),
        ),
        **score_constants(spec),
        GROUP=group,
        GROUP_ROWS=triton.next_power_of_2(group),
        ROWS=tiles.rows,
        HEAD_DIM=head_dim,
        COLUMNS=num_columns(head_dim),
        PAGE=page_size,
        BLOCK=tiles.block,
        SPLIT=split_tokens,
        ONE_SPLIT=num_splits == 1,
        QUANTIZED=pages.k_scale is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        options={"enable_fp_fusion": False},
    )
    return out_BNH
