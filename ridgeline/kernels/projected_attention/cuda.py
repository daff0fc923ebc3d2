"""Calls the kernel of cuda.cu: a few sequences, each KV head by a cluster of blocks, in CUDA C++.

The kernel starts while the one before it in the stream, which makes the projection, still runs.
`settled=True` is the caller's word that of what it reads the kernels in front wrote the projection
and nothing else: not the lengths, the slots, the page table, the angles or any older token, and
that they did not let it start before all that was there. It is then read before the wait.

    projected_attention(rows, pages, tables, spec, DecodeRun(settled=True))
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
    check_indices,
    decode_arguments,
    stage_bytes,
)
from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.extension import library, pointer, stream_of
from ridgeline.kernels.launch import is_only_compiling, target_of
from ridgeline.kernels.pages import Pages, PageTables, check_pages
from ridgeline.kernels.projected_attention.reference import Projected
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
    rows: Projected, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """The launcher; arguments and result are reference.py's, `run.config` is a Clustered. Sequences
    are not split, so `run.split_tokens` changes nothing.
    """
    qkv_BC, angles, slots_B, norm = rows
    check_pages(pages)
    reason = unsupported(qkv_BC, pages)
    if reason is not None:
        raise UnsupportedError(reason)
    (num_kv_heads, _, head_dim), target = pages.k_pages.shape[1:], target_of(qkv_BC)
    num_heads = qkv_BC.shape[1] // head_dim - 2 * num_kv_heads
    check_heads(num_heads, num_kv_heads, head_dim)
    check(rows, pages, tables)
    cut = run.config or Clustered()
    if not cut.fits(head_dim, pages.k_pages.dtype, target):
        raise UnsupportedError(f"{cut.label}: more shared memory than a block can have")
    functions = library("projected_attention")
    assert functions is not None, "unsupported() has looked"
    shape = (len(qkv_BC), num_heads, head_dim)
    out_BNH = torch.empty(shape, dtype=qkv_BC.dtype, device=qkv_BC.device)
    if not out_BNH.numel():
        return out_BNH
    cos_BA, sin_BA = (x.contiguous() for x in angles) if angles is not None else (None, None)
    job = ProjectedJob(
        decode=decode_arguments(
            qkv_BC, out_BNH, pages, tables, spec, stages=cut.stages, settled=run.settled
        ),
        cos=pointer(cos_BA),
        sin=pointer(sin_BA),
        q_norm=norm.q_weight.data_ptr() if norm is not None else None,
        k_norm=norm.k_weight.data_ptr() if norm is not None else None,
        slots=slots_B.data_ptr(),
        angles=cos_BA.shape[1] if cos_BA is not None else 0,
        eps=norm.eps if norm is not None else 0.0,
        offset=norm.offset if norm is not None else 0.0,
    )
    if is_only_compiling():
        return out_BNH
    error = functions.ridgeline_projected_attention(
        ctypes.byref(job),
        len(qkv_BC),
        head_dim,
        KINDS.index(pages.k_pages.dtype),
        cut.blocks,
        cut.num_warps,
        can_wait(target),
        c_void_p(stream_of(qkv_BC.device)),
    )
    if error:
        raise HardwareError(f"the CUDA kernel of projected_attention could not be started: {error}")
    return out_BNH


def unsupported(qkv_BC: Tensor, pages: Pages) -> str | None:
    """What the kernel does not do, so that Triton's has to serve; None: it takes these."""
    num_kv_heads, _, head_dim = pages.k_pages.shape[1:]
    dtype, group = pages.k_pages.dtype, qkv_BC.shape[1] // head_dim // num_kv_heads - 2
    if qkv_BC.dtype not in (torch.bfloat16, torch.float16) or dtype != qkv_BC.dtype:
        return f"a projection in {qkv_BC.dtype} and pages of {dtype}"
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
    """A heuristic until measured, `num_rows` = sequences × KV heads: as many blocks as start at
    once, if these are two or more of each. Else, and for sequences so long that reading them is all
    there is to it, Triton's kernel fills the chip better.
    """
    if longest > LONGEST:
        return None
    blocks = next((count for count in (8, 4, 2) if num_rows * count <= target.num_units), None)
    if blocks is None:
        return None
    cuts = (Clustered(blocks, 8, stages) for stages in (2, 1))
    return next((cut for cut in cuts if cut.fits(head_dim, dtype, target)), None)


def configs(num_rows: int, head_dim: int, dtype: torch.dtype, target: Target) -> list[Clustered]:
    """Worth timing, `num_rows` = sequences × KV heads: as long as all blocks start at once."""
    return [
        cut
        for blocks in (8, 4, 2, 1)
        for num_warps in (8, 4)
        for stages in (1, 2, 4)
        for cut in [Clustered(blocks, num_warps, stages)]
        if num_rows * blocks <= target.num_units and cut.fits(head_dim, dtype, target)
    ]


def exchange_bytes(head_dim: int) -> int:
    """cuda.cu's Exchange: heads in 16 bits, sums of a group's queries and their weights."""
    heads = (MOST_QUERIES + 2) * (head_dim + 8) * 2
    return heads + MOST_QUERIES * head_dim // 4 * (8 + 16)


def check(rows: Projected, pages: Pages, tables: PageTables) -> None:
    """What the kernel relies on and cannot see; and what it does not do."""
    qkv_BC, angles, slots_B, norm = rows
    assert qkv_BC.stride(1) == 1, "rows of qkv are not contiguous"
    if pages.k_pages.data_ptr() % 16 or pages.v_pages.data_ptr() % 16:
        raise UnsupportedError("pages must begin at a multiple of 16 bytes")
    check_indices(slots_B, tables.page_table, tables.lengths)
    for x in angles or ():
        if x.dtype != torch.float32:
            raise UnsupportedError(f"angles in {x.dtype}; fp32")
    for weight in (norm.q_weight, norm.k_weight) if norm is not None else ():
        if weight.dtype != qkv_BC.dtype or not weight.is_contiguous():
            raise UnsupportedError(
                f"weights of a norm in {weight.dtype}; {qkv_BC.dtype}, side by side"
            )
