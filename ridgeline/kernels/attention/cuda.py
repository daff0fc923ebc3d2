"""What the launchers over paged.cuh share: decode_attention/cuda.cu and projected_attention/cuda.cu
take the same pages, head dims and arguments.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_void_p

import torch

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
