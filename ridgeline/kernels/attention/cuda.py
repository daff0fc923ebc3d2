"""What the launchers over paged.cuh share: decode_attention/cuda.cu and projected_attention/cuda.cu
take the same pages, head dims and arguments.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_void_p

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.extension import pointer
from ridgeline.kernels.pages import Pages, PageTables

HEAD_DIMS = (64, 80, 96, 128, 256)
# By paged.cuh's numbers; the last is in decode attention's portable build only, for the AMD chips
# that have it.
KINDS = (
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.float8_e4m3fnuz,
)
STEP = 16  # tokens a warp takes at a time; splits are multiples of it


class DecodeArguments(ctypes.Structure):
    """paged.cuh's RidgelineDecode."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "k_scale", "v_scale", "table", "lengths")),
        *((name, c_void_p) for name in ("out", "partial", "stats", "counters")),
        ("q_stride", c_longlong),
        ("table_stride", c_longlong),
        *((name, c_int) for name in ("table_width", "num_kv_heads", "group", "page_shift")),
        *((name, c_int) for name in ("q_is_fp16", "window", "split_tokens", "num_splits")),
        ("stages", c_int),
        ("settled", c_int),
        ("scale", c_float),
        ("softcap", c_float),
    ]


def stage_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Shared memory that one step on its way takes of a warp: rows of K and V, and their scales. As
    paged.cuh's Layout has it.
    """
    return 2 * STEP * head_dim * dtype.itemsize + (8 * STEP if dtype.itemsize == 1 else 0)


def decode_arguments(
    q: Tensor,
    out_BNH: Tensor,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
    *,
    stages: int,
    settled: bool,
) -> DecodeArguments:
    """All but the splits: sequences whole, unless the caller says more. Rows of `q` are queries, or
    begin with them.
    """
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    return DecodeArguments(
        q=q.data_ptr(),
        k=pages.k_pages.data_ptr(),
        v=pages.v_pages.data_ptr(),
        k_scale=pointer(pages.k_scale),
        v_scale=pointer(pages.v_scale),
        table=tables.page_table.data_ptr(),
        lengths=tables.lengths.data_ptr(),
        out=out_BNH.data_ptr(),
        q_stride=q.stride(0),
        table_stride=tables.page_table.stride(0),
        table_width=tables.page_table.shape[1],
        num_kv_heads=num_kv_heads,
        group=out_BNH.shape[1] // num_kv_heads,
        page_shift=page_size.bit_length() - 1,
        q_is_fp16=q.dtype == torch.float16,
        window=spec.window or 0,
        stages=stages,
        settled=settled,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )


def check_indices(*tensors: Tensor) -> None:
    """Page table, lengths and slots as the kernels read them."""
    for tensor in tensors:
        if tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            raise ValueError("page table, lengths and slots are int32, their last dim contiguous")
