"""Calls the kernel of cuda.cu: decode attention in CUDA C++, one launch.

`DecodeCut` is how the work is cut, `choose_cut` what is used where nothing was timed, `cuts` what
is worth timing. The kernel may start while the one before it in the stream still runs; it then
waits for it before it reads anything. `settled=True` is the caller's word that the kernels of this
step wrote neither lengths nor page table, and of the pages only each sequence's newest token: then
everything else is read before the wait.

    decode_attention(q, pages, tables, spec, DecodeRun(settled=True))
"""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import HardwareError, UnsupportedError
from ridgeline.kernels.attention.cuda import (
    HEAD_DIMS,
    KINDS,
    STEP,
    check_indices,
    decode_arguments,
    stage_bytes,
)
from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import heads_together
from ridgeline.kernels.decode_attention.splits import (
    arrival_counters,
    choose_split,
    count_splits,
)
from ridgeline.kernels.extension import library, pointer, stream_of
from ridgeline.kernels.launch import is_only_compiling, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.targets import Target, can_wait

MAX_STATS_BYTES = 32 * 1024  # of shared memory, in which the last block keeps each split's maximum


@dataclass(frozen=True)
class DecodeCut:
    """How the work is cut."""

    num_warps: int = 8
    stages: int = 3  # steps of 16 tokens on their way for each warp: 1, 2, 3, 4 or 6
    per_unit: int = 2  # blocks an SM for which splits are made, where the caller gave none

    @property
    def label(self) -> str:
        return f"cuda w{self.num_warps} s{self.stages} b{self.per_unit}"


def decode_attention(
    q_BNH: Tensor,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
    run: DecodeRun = PLAIN,
    pdl: bool = True,
    defines: tuple[str, ...] = (),
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `run.config` is a DecodeCut."""
    check_pages(pages)
    check(q_BNH, pages, tables)
    batch, _, head_dim = q_BNH.shape
    num_kv_heads, target = pages.k_pages.shape[1], target_of(q_BNH)
    cut = run.config or choose_cut(head_dim, pages.k_pages.dtype, target)
    on_their_way = cut.num_warps * cut.stages * stage_bytes(head_dim, pages.k_pages.dtype)
    if on_their_way > target.shared_bytes - 2048:
        raise UnsupportedError(f"{cut.label} takes {on_their_way} bytes of shared memory")
    longest = tables.longest(pages.k_pages.shape[2])
    split_tokens = run.split_tokens
    if split_tokens is None:
        split_tokens = choose_split(
            batch * num_kv_heads, longest, target, STEP, cut.per_unit, at_most=True
        )
    if split_tokens % STEP:
        raise ValueError(f"split_tokens={split_tokens} is not a multiple of {STEP}")
    num_splits = count_splits(longest, split_tokens, spec.window)
    rows = rows_of_block(q_BNH, pages)
    if num_splits * rows * 8 > MAX_STATS_BYTES:
        raise UnsupportedError(f"{num_splits} splits of {split_tokens} tokens: make them longer")
    functions = library("decode_attention", defines)
    if functions is None:
        raise UnsupportedError(
            "decode_attention is not built in CUDA C++; `ridgeline kernels build`"
        )
    out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
    if not out_BNH.numel():
        return out_BNH
    q_BNH = q_BNH if readable(q_BNH) else q_BNH.contiguous()
    job = decode_arguments(
        q_BNH, out_BNH, pages, tables, spec, stages=cut.stages, settled=run.settled
    )
    job.split_tokens, job.num_splits = split_tokens, num_splits
    kept = memory_of_splits(q_BNH, pages, num_splits)
    if kept is not None:
        job.partial, job.stats, job.counters = map(pointer, kept)
    if is_only_compiling():
        return out_BNH
    error = functions.ridgeline_decode_attention(
        ctypes.byref(job),
        batch,
        head_dim,
        KINDS.index(pages.k_pages.dtype),
        cut.num_warps,
        pdl and can_wait(target),
        c_void_p(stream_of(q_BNH.device)),
    )
    if error:
        raise HardwareError(f"the CUDA kernel of decode_attention could not be started: {error}")
    return out_BNH


def memory_of_splits(
    q_BNH: Tensor, pages: Pages, num_splits: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Parts of the output, their weights and the counters; None where there is one split."""
    if num_splits == 1:
        return None
    (batch, num_heads, head_dim), num_kv_heads = q_BNH.shape, pages.k_pages.shape[1]
    rows, device = rows_of_block(q_BNH, pages), q_BNH.device
    num_counters = batch * num_kv_heads * -(-(num_heads // num_kv_heads) // rows)
    shape = (num_counters, num_splits, rows)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=device)
    return partial, stats, arrival_counters(num_counters, device)


def check(q_BNH: Tensor, pages: Pages, tables: PageTables) -> None:
    """What the kernel does not do: UnsupportedError, and Triton's has to serve."""
    k_pages, v_pages, head_dim = pages.k_pages, pages.v_pages, q_BNH.shape[2]
    check_heads(q_BNH.shape[1], k_pages.shape[1], head_dim)
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(f"head dim {head_dim}; there are {HEAD_DIMS}")
    if q_BNH.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"queries in {q_BNH.dtype}; bf16 or fp16")
    if k_pages.dtype not in KINDS:
        raise UnsupportedError(f"pages of {k_pages.dtype}")
    if k_pages.element_size() == 2 and k_pages.dtype != q_BNH.dtype:
        raise UnsupportedError(f"queries in {q_BNH.dtype} over pages of {k_pages.dtype}")
    if k_pages.data_ptr() % 16 or v_pages.data_ptr() % 16:
        raise UnsupportedError("pages must begin at a multiple of 16 bytes")
    for scale in (pages.k_scale, pages.v_scale):
        if scale is not None and scale.dtype != torch.float32:
            raise ValueError(f"scales are fp32, not {scale.dtype}")
    check_indices(tables.page_table, tables.lengths)


def readable(q_BNH: Tensor) -> bool:
    """Only the rows apart, and each number of a row in whole pieces of 8 bytes."""
    return heads_together(q_BNH) and q_BNH.data_ptr() % 8 == 0 and q_BNH.stride(0) % 4 == 0


def supported(q_BNH: Tensor, pages: Pages) -> bool:
    """Whether the kernel was built and takes these; for the public function's choice."""
    dtype = pages.k_pages.dtype
    alike = dtype in KINDS and (dtype.itemsize == 1 or dtype == q_BNH.dtype)
    takes = q_BNH.dtype in KINDS[:2] and q_BNH.shape[2] in HEAD_DIMS and alike
    return takes and library("decode_attention") is not None


def rows_of_block(q_BNH: Tensor, pages: Pages) -> int:
    """Query heads of a group that a block serves; for more of them, K and V are read again."""
    return min(q_BNH.shape[1] // pages.k_pages.shape[1], 8 if q_BNH.shape[2] > 128 else 16)


def choose_cut(head_dim: int, dtype: torch.dtype, target: Target) -> DecodeCut:
    """By head dim and dtype alone, never by the batch: results must not depend on it.

    Blocks share an SM, so that some work while others begin or end. Many short sequences of codes
    are through so soon that it takes four: on an H200 512 sequences of 400 tokens in fp8 took
    141 µs in two blocks of 8 warps and 119 in four of 4, 1,000 with lengths of chats 255 and 224,
    64 of 8,192 tokens 325 and 295, one of 32,768 26 and 29 (2026-11-19). Of 16 bits: two, with
    three steps on their way for each of as many warps as then fit.
    """
    if dtype.itemsize == 1:
        return DecodeCut(4 if head_dim <= 128 else 2, 2, 4)
    room = min(target.shared_bytes, 227 * 1024) // 2 - 2048
    for num_warps in (8, 4, 2):
        if num_warps * 3 * stage_bytes(head_dim, dtype) <= room:
            return DecodeCut(num_warps, 3)
    return DecodeCut(2, 2)


def cuts(head_dim: int, dtype: torch.dtype, target: Target) -> list[DecodeCut]:
    """What is worth timing."""
    step = stage_bytes(head_dim, dtype)
    return [
        DecodeCut(num_warps, stages, per_unit)
        for num_warps in (8, 4)
        for stages in (2, 3, 4, 6)
        for per_unit in (1, 2, 4)
        if num_warps * stages * step * per_unit <= target.shared_bytes
        and num_warps * stages * step * per_unit >= 64 * 1024
    ]
