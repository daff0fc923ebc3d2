"""Calls the kernel of cuda.cu: a few sequences, each KV head by a cluster of blocks, in CUDA C++.

The kernel starts while the one before it in the stream, which makes the projection, still runs.
`settled=True` is the caller's word that of what it reads the kernels in front wrote the projection
and nothing else: not the lengths, the slots, the page table, the angles or any older token, and
that they did not let it start before all that was there. It is then read before the wait.

    projected_attention(qkv, cos, sin, slots, k_pages, v_pages, table, lengths, spec, settled=True)
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import HardwareError, UnsupportedError
from ridgeline.kernels.attention.cuda import (
    HEAD_DIMS,
    KINDS,
    DecodeArguments,
    stage_bytes,
)
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.attention.triton import check_pages
from ridgeline.kernels.extension import library, pointer, stream_of
from ridgeline.kernels.launch import is_only_compiling, target_of
from ridgeline.kernels.targets import Target, can_wait

MOST_QUERIES = 8  # of a group; as cuda.cu has it
LONGEST = 16384  # tokens; an 8B layer on an H200 with 32,768 took 109.6 µs, by Triton's 102.3


@dataclass(frozen=True)
class Clustered:
    """How the work is cut: `blocks` serve a KV head of a sequence, and each of their warps has
    `stages` steps of 16 tokens on their way.
    """

    blocks: int = 8
    num_warps: int = 8
    stages: int = 1

    @property
    def label(self) -> str:
        return f"cuda cluster {self.blocks} w{self.num_warps} s{self.stages}"

    def fits(self, head_dim: int, dtype: torch.dtype, target: Target) -> bool:
        """Whether a block's shared memory holds its queues and what the blocks exchange."""
        queues = self.num_warps * self.stages * stage_bytes(head_dim, dtype)
        return queues + exchange_bytes(head_dim) <= target.shared_bytes


class ProjectedJob(ctypes.Structure):
    """cuda.cu's RidgelineProjected."""

    _fields_ = [
        ("decode", DecodeArguments),
        *((name, c_void_p) for name in ("cos", "sin", "q_norm", "k_norm", "slots")),
        ("angles", c_int),
        ("eps", c_float),
        ("offset", c_float),
    ]


def projected_attention(
    qkv_BC: Tensor,
    cos_BA: Tensor | None,
    sin_BA: Tensor | None,
    slots_B: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    spec: AttentionSpec,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    q_norm_H: Tensor | None = None,
    k_norm_H: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    settled: bool = False,
    config: Clustered | None = None,
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `config` what a tuner may choose."""
    check_pages(k_pages_PKSH, v_pages_PKSH, k_scale_PKS, v_scale_PKS)
    reason = unsupported(qkv_BC, k_pages_PKSH)
    if reason is not None:
        raise UnsupportedError(reason)
    (num_kv_heads, page_size, head_dim), target = k_pages_PKSH.shape[1:], target_of(qkv_BC)
    num_heads = qkv_BC.shape[1] // head_dim - 2 * num_kv_heads
    check_heads(num_heads, num_kv_heads, head_dim)
    if k_pages_PKSH.data_ptr() % 16 or v_pages_PKSH.data_ptr() % 16:
        raise UnsupportedError("pages must begin at a multiple of 16 bytes")
    _check(qkv_BC, slots_B, page_table_BM, lengths_B, cos_BA, sin_BA, q_norm_H, k_norm_H)
    cos_BA, sin_BA = (None if x is None else x.contiguous() for x in (cos_BA, sin_BA))
    way = config or Clustered()
    if not way.fits(head_dim, k_pages_PKSH.dtype, target):
        raise UnsupportedError(f"{way.label}: more shared memory than a block can have")
    functions = library("projected_attention")
    assert functions is not None, "unsupported() has looked"
    shape = (len(qkv_BC), num_heads, head_dim)
    out_BNH = torch.empty(shape, dtype=qkv_BC.dtype, device=qkv_BC.device)
    if not out_BNH.numel():
        return out_BNH
    decode = DecodeArguments(
        *map(pointer, (qkv_BC, k_pages_PKSH, v_pages_PKSH, None, None, page_table_BM, lengths_B)),
        *map(pointer, (out_BNH, None, None, None)),
        q_stride=qkv_BC.stride(0),
        table_stride=page_table_BM.stride(0),
        table_width=page_table_BM.shape[1],
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        page_shift=page_size.bit_length() - 1,
        q_is_fp16=qkv_BC.dtype == torch.float16,
        window=spec.window or 0,
        stages=way.stages,
        settled=settled,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )
    job = ProjectedJob(
        decode,
        *map(pointer, (cos_BA, sin_BA, q_norm_H, k_norm_H, slots_B)),
        cos_BA.shape[1] if cos_BA is not None else 0,
        eps,
        offset,
    )
    if is_only_compiling():
        return out_BNH
    error = functions.ridgeline_projected_attention(
        ctypes.byref(job),
        len(qkv_BC),
        head_dim,
        KINDS.index(k_pages_PKSH.dtype),
        way.blocks,
        way.num_warps,
        can_wait(target),
        c_void_p(stream_of(qkv_BC.device)),
    )
    if error:
        raise HardwareError(f"the CUDA kernel of projected_attention could not be started: {error}")
    return out_BNH


def unsupported(qkv_BC: Tensor, k_pages_PKSH: Tensor) -> str | None:
    """What the kernel does not do, so that Triton's has to serve; None: it takes these."""
    num_kv_heads, _, head_dim = k_pages_PKSH.shape[1:]
    group = (qkv_BC.shape[1] // head_dim - 2 * num_kv_heads) // num_kv_heads
    if qkv_BC.dtype not in (torch.bfloat16, torch.float16) or k_pages_PKSH.dtype != qkv_BC.dtype:
        return f"a projection in {qkv_BC.dtype} and pages of {k_pages_PKSH.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim}; there are {HEAD_DIMS}"
    if group > MOST_QUERIES:
        return f"{group} query heads a KV head; {MOST_QUERIES} at most"
    if not can_wait(target_of(qkv_BC)):
        return "clusters of blocks are Hopper's and later chips'"
    if library("projected_attention") is None:
        return "projected_attention is not built in CUDA C++; `ridgeline kernels build`"
    return None


def choose(
    num_rows: int, longest: int, head_dim: int, dtype: torch.dtype, target: Target
) -> Clustered | None:
    """A guess until measured, `num_rows` = sequences × KV heads: as many blocks as start at once,
    if these are two or more of each. Else, and for sequences so long that reading them is all there
    is to it, Triton's kernel fills the chip better.
    """
    if longest > LONGEST:
        return None
    blocks = next((count for count in (8, 4, 2) if num_rows * count <= target.num_units), None)
    if blocks is None:
        return None
    ways = (Clustered(blocks, 8, stages) for stages in (2, 1))
    return next((way for way in ways if way.fits(head_dim, dtype, target)), None)


def ways(num_rows: int, head_dim: int, dtype: torch.dtype, target: Target) -> list[Clustered]:
    """Worth timing, `num_rows` = sequences × KV heads: as long as all blocks start at once."""
    return [
        way
        for blocks in (8, 4, 2, 1)
        for num_warps in (8, 4)
        for stages in (1, 2, 4)
        for way in [Clustered(blocks, num_warps, stages)]
        if num_rows * blocks <= target.num_units and way.fits(head_dim, dtype, target)
    ]


def exchange_bytes(head_dim: int) -> int:
    """cuda.cu's Exchange: heads in 16 bits, sums of a group's queries and their weights."""
    heads = (MOST_QUERIES + 2) * (head_dim + 8) * 2
    return heads + MOST_QUERIES * head_dim // 4 * (8 + 16)


def _check(qkv_BC: Tensor, *others: Tensor | None) -> None:
    """What the kernel relies on and cannot see; and what it does not do."""
    slots_B, page_table_BM, lengths_B, cos_BA, sin_BA, q_norm_H, k_norm_H = others
    assert qkv_BC.stride(1) == 1, "rows of qkv are not contiguous"
    for indices in (slots_B, page_table_BM, lengths_B):
        assert indices is not None
        if indices.dtype != torch.int32 or (indices.numel() and indices.stride(-1) != 1):
            raise ValueError("slots, page table and lengths are int32, their last dim contiguous")
    for angles in (cos_BA, sin_BA):
        if angles is not None and angles.dtype != torch.float32:
            raise UnsupportedError(f"angles in {angles.dtype}; fp32")
    for norm in (q_norm_H, k_norm_H):
        if norm is not None and (norm.dtype != qkv_BC.dtype or not norm.is_contiguous()):
            raise UnsupportedError(
                f"weights of a norm in {norm.dtype}; {qkv_BC.dtype}, side by side"
            )
