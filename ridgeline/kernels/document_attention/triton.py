"""Attention of packed documents in Triton, forward and backward: windows, soft cap, GQA.

A block of queries may hold the ends of several documents: each query knows where its document
begins, and sees no key before that; where queries are the last ones of more keys, it knows its own
place among the keys (PLACED). Keys and values get their gradients block by block from the
queries that see them, queries from the keys they see, so that every sum has one order: the same
inputs give the same bits, and no document changes another's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.document_attention.reference import Documents
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.targets import Target, roomy

LOG2_E = 1.4426950408889634


@triton.jit
def load_rows(ptr, rows, num_rows, stride, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """[rows, BLOCK_H] of one head; 0 outside."""
    dims = tl.arange(0, BLOCK_H)
    keep = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + dims[None, :], mask=keep, other=0.0)


@triton.jit
def store_rows(ptr, value, rows, num_rows, stride, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    dims = tl.arange(0, BLOCK_H)
    keep = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    ptrs = ptr + rows[:, None].to(tl.int64) * stride + dims[None, :]
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def scored(q, k, scale, softcap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores [queries, keys] and the slope of the soft cap."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    slope = 1.0
    if HAS_CAP:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(score / softcap * 2.8853900817779268))
        score, slope = softcap * tanh, 1.0 - tanh * tanh
    return score, slope


@triton.jit
def places_of(places_ptr, queries, num_tokens, PLACED: tl.constexpr):
    """The key that each query stands beside."""
    places = queries
    if PLACED:
        places = tl.load(places_ptr + queries, mask=queries < num_tokens, other=0)
    return places


@triton.jit
def visible(queries, places, keys, begins, num_tokens, window, HAS_WINDOW: tl.constexpr):
    seen = (keys[None, :] <= places[:, None]) & (keys[None, :] >= begins[:, None])
    if HAS_WINDOW:
        seen = seen & (keys[None, :] > places[:, None] - window)
    return seen & (queries < num_tokens)[:, None]


@triton.jit
def seen_keys(
    begins_ptr,
    places_ptr,
    first_query,
    num_tokens,
    window,
    HAS_WINDOW: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where the keys begin that a block of queries sees, at the edge of a block of keys, and where
    they end.
    """
    first, last = first_query, tl.minimum(first_query + BLOCK_M, num_tokens) - 1
    low = tl.load(begins_ptr + first_query)
    if PLACED:
        first, last = tl.load(places_ptr + first), tl.load(places_ptr + last)
    if HAS_WINDOW:
        low = tl.maximum(low, first - window + 1)
    return low // BLOCK_N * BLOCK_N, last + 1


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    begins_ptr,
    places_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    num_tokens,
    num_keys,
    scale,
    softcap,
    window,
    GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    first_query = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    queries = first_query + tl.arange(0, BLOCK_M)
    begins = tl.load(begins_ptr + queries, mask=queries < num_tokens, other=num_keys)
    places = places_of(places_ptr, queries, num_tokens, PLACED)
    q = load_rows(q_ptr + head * q_head_stride, queries, num_tokens, q_stride, HEAD_DIM, BLOCK_H)
    k_ptr += (head // GROUPS) * k_head_stride
    v_ptr += (head // GROUPS) * v_head_stride
    largest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    low, high = seen_keys(
        begins_ptr, places_ptr, first_query, num_tokens, window,
        HAS_WINDOW, PLACED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, keys, num_keys, k_stride, HEAD_DIM, BLOCK_H)
        v = load_rows(v_ptr, keys, num_keys, v_stride, HEAD_DIM, BLOCK_H)
        score, _ = scored(q, k, scale, softcap, HAS_CAP, PRECISION)
        seen = visible(queries, places, keys, begins, num_tokens, window, HAS_WINDOW)
        score = tl.where(seen, score * LOG2_E, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=1))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # a query that saw nothing yet
        share = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(share, axis=1)
        out = out * shrink[:, None]
        out += tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        largest = larger
    total = tl.where(total == 0.0, 1.0, total)  # rows past the end saw nothing
    out = out / total[:, None]
    out_stride = NUM_HEADS * HEAD_DIM
    store_rows(out_ptr + head * HEAD_DIM, out, queries, num_tokens, out_stride, HEAD_DIM, BLOCK_H)
    lse_ptrs = lse_ptr + head.to(tl.int64) * num_tokens + queries
    tl.store(lse_ptrs, largest + tl.log2(total), mask=queries < num_tokens)


@triton.jit
def delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The sum of out times its gradient, for each query and head."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    stride = NUM_HEADS * HEAD_DIM
    out = load_rows(out_ptr + head * HEAD_DIM, rows, num_tokens, stride, HEAD_DIM, BLOCK_H)
    grad = load_rows(grad_ptr + head * HEAD_DIM, rows, num_tokens, stride, HEAD_DIM, BLOCK_H)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), axis=1)
    delta_ptrs = delta_ptr + head.to(tl.int64) * num_tokens + rows
    tl.store(delta_ptrs, delta, mask=rows < num_tokens)


@triton.jit
def shares_and_slopes(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    queries,
    places,
    keys,
    begins,
    num_tokens,
    scale,
    softcap,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """The softmax [queries, keys] again, and the gradient of q · k."""
    score, slope = scored(q, k, scale, softcap, HAS_CAP, PRECISION)
    seen = visible(queries, places, keys, begins, num_tokens, window, HAS_WINDOW)
    share = tl.where(seen, tl.exp2(score * LOG2_E - lse[:, None]), 0.0)
    passed = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return share, share * (passed - delta[:, None]) * slope * scale


@triton.jit
def query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    begins_ptr,
    places_ptr,
    grad_q_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    num_tokens,
    num_keys,
    scale,
    softcap,
    window,
    GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    first_query = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    queries = first_query + tl.arange(0, BLOCK_M)
    in_rows = queries < num_tokens
    begins = tl.load(begins_ptr + queries, mask=in_rows, other=num_keys)
    places = places_of(places_ptr, queries, num_tokens, PLACED)
    stride = NUM_HEADS * HEAD_DIM
    q = load_rows(q_ptr + head * q_head_stride, queries, num_tokens, q_stride, HEAD_DIM, BLOCK_H)
    grad = load_rows(grad_ptr + head * HEAD_DIM, queries, num_tokens, stride, HEAD_DIM, BLOCK_H)
    own = head.to(tl.int64) * num_tokens + queries
    lse = tl.load(lse_ptr + own, mask=in_rows, other=0.0)
    delta = tl.load(delta_ptr + own, mask=in_rows, other=0.0)
    k_ptr += (head // GROUPS) * k_head_stride
    v_ptr += (head // GROUPS) * v_head_stride
    grad_q = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    low, high = seen_keys(
        begins_ptr, places_ptr, first_query, num_tokens, window,
        HAS_WINDOW, PLACED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, keys, num_keys, k_stride, HEAD_DIM, BLOCK_H)
        v = load_rows(v_ptr, keys, num_keys, v_stride, HEAD_DIM, BLOCK_H)
        _, slopes = shares_and_slopes(
            q, k, v, grad, lse, delta, queries, places, keys, begins, num_tokens, scale, softcap,
            window, HAS_CAP, HAS_WINDOW, PRECISION, LOG2_E,
        )  # fmt: skip
        grad_q += tl.dot(slopes.to(k.dtype), k, input_precision=PRECISION)
    store_rows(grad_q_ptr + head * HEAD_DIM, grad_q, queries, num_tokens, stride, HEAD_DIM, BLOCK_H)


@triton.jit
def key_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    begins_ptr,
    places_ptr,
    firsts_ptr,
    ends_ptr,
    grad_k_ptr,
    grad_v_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    num_tokens,
    num_keys,
    scale,
    softcap,
    window,
    GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Of one block of keys and one KV head, over all queries that see it, head after head."""
    first = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    keys = first + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + kv_head * k_head_stride, keys, num_keys, k_stride, HEAD_DIM, BLOCK_H)
    v = load_rows(v_ptr + kv_head * v_head_stride, keys, num_keys, v_stride, HEAD_DIM, BLOCK_H)
    last = tl.minimum(first + BLOCK_N, num_keys) - 1
    begin, end = first, tl.load(ends_ptr + last)
    if PLACED:
        begin = tl.load(firsts_ptr + first)
    elif HAS_WINDOW:
        end = tl.minimum(end, last + window)
    stride = NUM_HEADS * HEAD_DIM
    grad_k = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    grad_v = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        for start in range(begin // BLOCK_M * BLOCK_M, end, BLOCK_M):
            queries = start + tl.arange(0, BLOCK_M)
            in_rows = queries < num_tokens
            begins = tl.load(begins_ptr + queries, mask=in_rows, other=num_keys)
            places = places_of(places_ptr, queries, num_tokens, PLACED)
            q = load_rows(
                q_ptr + head * q_head_stride, queries, num_tokens, q_stride, HEAD_DIM, BLOCK_H
            )
            grad = load_rows(
                grad_ptr + head * HEAD_DIM, queries, num_tokens, stride, HEAD_DIM, BLOCK_H
            )
            own = tl.cast(head, tl.int64) * num_tokens + queries
            lse = tl.load(lse_ptr + own, mask=in_rows, other=0.0)
            delta = tl.load(delta_ptr + own, mask=in_rows, other=0.0)
            share, slopes = shares_and_slopes(
                q, k, v, grad, lse, delta, queries, places, keys, begins, num_tokens, scale,
                softcap, window, HAS_CAP, HAS_WINDOW, PRECISION, LOG2_E,
            )  # fmt: skip
            grad_v += tl.dot(tl.trans(share.to(grad.dtype)), grad, input_precision=PRECISION)
            grad_k += tl.dot(tl.trans(slopes.to(q.dtype)), q, input_precision=PRECISION)
    kv_stride = NUM_HEADS // GROUPS * HEAD_DIM
    store_rows(
        grad_k_ptr + kv_head * HEAD_DIM, grad_k, keys, num_keys, kv_stride, HEAD_DIM, BLOCK_H
    )
    store_rows(
        grad_v_ptr + kv_head * HEAD_DIM, grad_v, keys, num_keys, kv_stride, HEAD_DIM, BLOCK_H
    )


class Blocks(NamedTuple):
    """Queries and keys of a program's tiles, forward and backward. Heuristics until measured."""

    queries: int = 128
    keys: int = 64
    backward_queries: int = 64
    backward_keys: int = 64
    seen_by: int = 64  # queries at once that a block of keys gets its gradient from
    num_warps: int = 8


def choose(head_dim: int, dtype: torch.dtype, target: Target) -> Blocks:
    """What fits into registers and, on gfx942, into 64 KiB of shared memory."""
    if target.backend == "hip":
        return Blocks(64, 32, 32, 32, 32, 4)
    if dtype == torch.float32:
        return Blocks(32, 32, 16, 16, 16)
    if head_dim > 128:
        return Blocks(64, 32, 32, 32, 32)
    return Blocks() if head_dim <= 64 else Blocks(seen_by=32)


class Attended(NamedTuple):
    out_TNH: Tensor
    lse_NT: Tensor  # fp32: the logarithm (of two) of each query's softmax sum


class Bounds(NamedTuple):
    """Who sees whom, int32: by query (T), and by key where those are more (S)."""

    begins_T: Tensor  # the first key of a query's document
    ends_S: Tensor  # the row behind the last query that sees a key, the window aside if not placed
    places_T: Tensor | None = None  # the key that a query stands beside; None: as many keys
    firsts_S: Tensor | None = None  # the first query that sees a key


def bounds(
    documents: Documents, num_tokens: int, keys: Documents | None = None, window: int | None = None
) -> Bounds:
    starts = documents.starts
    counts = starts.diff()
    if keys is None:
        begins, ends = (_each(part, counts, num_tokens) for part in (starts[:-1], starts[1:]))
        return Bounds(begins, ends)
    num_keys, key_counts = sum(keys.lengths), keys.starts.diff()
    shifts = (keys.starts - starts)[1:]  # from a query to its key: both end together
    begins, shifts_T = (_each(x, counts, num_tokens) for x in (keys.starts[:-1], shifts))
    places = torch.arange(num_tokens, dtype=torch.int32, device=starts.device) + shifts_T
    first, last, shifts_S = (
        _each(x, key_counts, num_keys) for x in (starts[:-1], starts[1:], shifts)
    )
    rows = torch.arange(num_keys, dtype=torch.int32, device=starts.device) - shifts_S
    if window is not None:
        last = torch.minimum(last, torch.maximum(first, rows + window))
    return Bounds(begins, last, places, torch.maximum(first, rows))


def _each(values_D: Tensor, counts_D: Tensor, num_rows: int) -> Tensor:
    return torch.repeat_interleave(values_D, counts_D, output_size=num_rows).contiguous()


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    bounds: Bounds,
    spec: AttentionSpec,
    blocks: Blocks | None = None,
) -> Attended:
    num_tokens, num_heads, head_dim = q_TNH.shape
    blocks = blocks or choose(head_dim, q_TNH.dtype, target_of(q_TNH))
    out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q_TNH.device)
    launch(
        forward_kernel,
        (triton.cdiv(num_tokens, blocks.queries), num_heads),
        (q_TNH, k_TKH, v_TKH, out, lse, *_by_query(bounds), *_numbers(q_TNH, k_TKH, v_TKH, spec)),
        **_constants(q_TNH, k_TKH, spec, bounds),
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        num_warps=blocks.num_warps,
    )
    return Attended(out, lse)


def gradients(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    attended: Attended,
    grad_TNH: Tensor,
    bounds: Bounds,
    spec: AttentionSpec,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """For q, k and v."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    blocks = blocks or choose(head_dim, q_TNH.dtype, target_of(q_TNH))
    grad = grad_TNH.contiguous()
    delta = torch.empty_like(attended.lse_NT)
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_TKH, v_TKH)
    )
    numbers = _numbers(q_TNH, k_TKH, v_TKH, spec)
    constants = _constants(q_TNH, k_TKH, spec, bounds)
    tiles: dict[str, Any] = {
        "BLOCK_M": blocks.backward_queries,
        "BLOCK_N": blocks.backward_keys,
        "num_warps": blocks.num_warps,
    }
    num_blocks = triton.cdiv(num_tokens, blocks.backward_queries)
    launch(
        delta_kernel,
        (num_blocks, num_heads),
        (attended.out_TNH, grad, delta, num_tokens),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=constants["BLOCK_H"],
        BLOCK_M=blocks.backward_queries,
        num_warps=4,
        options=roomy(target_of(q_TNH)),
    )
    tensors = (q_TNH, k_TKH, v_TKH, grad, attended.lse_NT, delta, *_by_query(bounds))
    firsts = bounds.ends_S if bounds.firsts_S is None else bounds.firsts_S
    launch(
        query_gradient_kernel,
        (num_blocks, num_heads),
        (*tensors, grad_q, *numbers),
        **constants,
        **tiles,
    )
    launch(
        key_gradient_kernel,
        (triton.cdiv(len(k_TKH), blocks.backward_keys), num_kv_heads),
        (*tensors, firsts, bounds.ends_S, grad_k, grad_v, *numbers),
        **constants,
        **tiles | {"BLOCK_M": blocks.seen_by},
    )
    return grad_q, grad_k, grad_v


def _by_query(bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Places are read only where queries are placed."""
    return bounds.begins_T, bounds.begins_T if bounds.places_T is None else bounds.places_T


def _numbers(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec) -> list[Any]:
    """Arguments that all kernels have, in their order: strides, sizes, scale, cap, window."""
    assert all(x.stride(-1) == 1 for x in (q_TNH, k_TKH, v_TKH)), "heads are contiguous"
    strides = [stride for x in (q_TNH, k_TKH, v_TKH) for stride in x.stride()[:2]]
    cap, window = float(spec.softcap or 1.0), spec.window or 0
    return [*strides, q_TNH.shape[0], k_TKH.shape[0], float(spec.scale), cap, window]


def _constants(q_TNH: Tensor, k_TKH: Tensor, spec: AttentionSpec, bounds: Bounds) -> dict[str, Any]:
    num_heads, head_dim = q_TNH.shape[1:]
    return {
        "GROUPS": num_heads // k_TKH.shape[1],
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": max(16, triton.next_power_of_2(head_dim)),
        "HAS_CAP": spec.softcap is not None,
        "HAS_WINDOW": spec.window is not None,
        "PLACED": bounds.places_T is not None,
        # Of products in fp32: three in tf32 are as exact as the sum, and on tensor cores. gfx950
        # knows no other word than ieee.
        "PRECISION": "tf32x3" if target_of(q_TNH).backend == "cuda" else "ieee",
        "LOG2_E": LOG2_E,
    }
