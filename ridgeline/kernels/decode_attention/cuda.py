"""Calls the kernel of cuda.cu: decode attention in CUDA C++, one launch.

`DecodeCut` is how the work is cut, `choose_cut` what is used where nothing was timed, `cuts` what
is worth timing. The kernel may start while the one before it in the stream still runs; it then
waits for it before it reads anything. `settled=True` is the caller's word that the kernels of this
step wrote neither lengths nor page table, and of the pages only each sequence's newest token: then
everything else is read before the wait.

    decode_attention(q, k_pages, v_pages, page_table, lengths, spec, settled=True)
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
    DecodeArguments,
    stage_bytes,
)
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import check_pages, heads_together
from ridgeline.kernels.decode_attention.splits import (
    arrival_counters,
    choose_split,
    count_splits,
    longest_sequence,
)
from ridgeline.kernels.extension import library, pointer, stream_of
from ridgeline.kernels.launch import is_only_compiling, target_of
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
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    spec: AttentionSpec,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    config: DecodeCut | None = None,
    settled: bool = False,
    pdl: bool = True,
    defines: tuple[str, ...] = (),
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `config` what a tuner may choose."""
    pages = (k_pages_PKSH, v_pages_PKSH, k_scale_PKS, v_scale_PKS)
    check_pages(*pages)
    check(q_BNH, *pages, page_table_BM, lengths_B)
    batch, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = k_pages_PKSH.shape[1:3]
    group = num_heads // num_kv_heads
    target = target_of(q_BNH)
    cut = config or choose_cut(head_dim, k_pages_PKSH.dtype, target)
    on_their_way = cut.num_warps * cut.stages * stage_bytes(head_dim, k_pages_PKSH.dtype)
    if on_their_way > target.shared_bytes - 2048:
        raise UnsupportedError(f"{cut.label} takes {on_their_way} bytes of shared memory")
    longest = longest_sequence(page_table_BM, page_size, max_length)
    if split_tokens is None:
        split_tokens = choose_split(
            batch * num_kv_heads, longest, target, STEP, cut.per_unit, at_most=True
        )
    if split_tokens % STEP:
        raise ValueError(f"split_tokens={split_tokens} is not a multiple of {STEP}")
    num_splits = count_splits(longest, split_tokens, spec.window)
    rows = min(group, max_rows(head_dim))
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
    partial = stats = counters = None
    if num_splits > 1:
        num_counters = batch * num_kv_heads * -(-group // rows)
        shape = (num_counters, num_splits, rows)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_BNH.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q_BNH.device)
        counters = arrival_counters(num_counters, q_BNH.device)
    q_BNH = q_BNH if readable(q_BNH) else q_BNH.contiguous()
    job = DecodeArguments(
        *map(pointer, (q_BNH, k_pages_PKSH, v_pages_PKSH, k_scale_PKS, v_scale_PKS)),
        *map(pointer, (page_table_BM, lengths_B, out_BNH, partial, stats, counters)),
        q_BNH.stride(0),
        page_table_BM.stride(0),
        page_table_BM.shape[1],
        num_kv_heads,
        group,
        page_size.bit_length() - 1,
        q_BNH.dtype == torch.float16,
        spec.window or 0,
        split_tokens,
        num_splits,
        cut.stages,
        settled,
        spec.scale,
        spec.softcap or 0.0,
    )
    if is_only_compiling():
        return out_BNH
    error = functions.ridgeline_decode_attention(
        ctypes.byref(job),
        batch,
        head_dim,
        KINDS.index(k_pages_PKSH.dtype),
        cut.num_warps,
        pdl and can_wait(target),
        c_void_p(stream_of(q_BNH.device)),
    )
    if error:
        raise HardwareError(f"the CUDA kernel of decode_attention could not be started: {error}")
    return out_BNH


def check(
    q_BNH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    page_table_BM: Tensor,
    lengths_B: Tensor,
) -> None:
    """What the kernel does not do: UnsupportedError, and Triton's has to serve."""
    head_dim = q_BNH.shape[2]
    check_heads(q_BNH.shape[1], k_pages.shape[1], head_dim)
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(f"head dim {head_dim}; there are {HEAD_DIMS}")
    if q_BNH.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"queries in {q_BNH.dtype}; bf16 or fp16")
    if k_pages.dtype not in KINDS or v_pages.dtype != k_pages.dtype:
        raise UnsupportedError(f"pages of {k_pages.dtype} and {v_pages.dtype}")
    if k_pages.element_size() == 2 and k_pages.dtype != q_BNH.dtype:
        raise UnsupportedError(f"queries in {q_BNH.dtype} over pages of {k_pages.dtype}")
    if k_pages.data_ptr() % 16 or v_pages.data_ptr() % 16:
        raise UnsupportedError("pages must begin at a multiple of 16 bytes")
    for scale in (k_scale, v_scale):
        if scale is not None and scale.dtype != torch.float32:
            raise ValueError(f"scales are fp32, not {scale.dtype}")
    for tensor in (page_table_BM, lengths_B):
        if tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            raise ValueError("page table and lengths are int32, their last dim contiguous")


def readable(q_BNH: Tensor) -> bool:
    """Only the rows apart, and each number of a row in whole pieces of 8 bytes."""
    return heads_together(q_BNH) and q_BNH.data_ptr() % 8 == 0 and q_BNH.stride(0) % 4 == 0


def supported(q_BNH: Tensor, k_pages_PKSH: Tensor) -> bool:
    """Whether the kernel was built and takes these; for the public function's choice."""
    dtype = k_pages_PKSH.dtype
    alike = dtype in KINDS and (dtype.itemsize == 1 or dtype == q_BNH.dtype)
    takes = q_BNH.dtype in KINDS[:2] and q_BNH.shape[2] in HEAD_DIMS and alike
    return takes and library("decode_attention") is not None


def max_rows(head_dim: int) -> int:
    """Query heads of a group that a block serves; for more of them, K and V are read again."""
    return 8 if head_dim > 128 else 16


def choose_cut(head_dim: int, dtype: torch.dtype, target: Target) -> DecodeCut:
    """By head dim and dtype alone, never by the batch: results must not depend on it.

    A heuristic until measured: two blocks an SM, so that one works while the other begins or ends,
    and three steps on their way for each of as many warps as then fit.
    """
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
