"""Attention over pages by cpu.cpp, for prompts and for single tokens; host_library.py builds it.
See reference.py for what it is, and for the letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.host_library import address, function, short_name
from ridgeline.kernels.pages import Pages, PageTables, holds_codes
from ridgeline.kernels.prefill_attention.reference import Packing

MAX_HEAD_DIM = 512


def supported(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
    """Pages of the queries' dtype or of the codes that have scales; for queries in fp32 any."""
    codes = kv_dtype in (torch.int8, torch.float8_e4m3fn)
    return head_dim <= MAX_HEAD_DIM and (dtype in (kv_dtype, torch.float32) or codes)


def prefill_attention(
    q_TNH: Tensor, packing: Packing, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """Starts, page table and lengths are int32; see `supported` for dtypes."""
    starts = packing.starts
    num_heads, head_dim = q_TNH.shape[1:]
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    assert starts.dtype == tables.page_table.dtype == tables.lengths.dtype == torch.int32
    assert holds_codes(pages.k_pages.dtype) == (pages.k_scale is not None), "codes have scales"
    q_TNH = q_TNH.contiguous()
    out_TNH = torch.empty_like(q_TNH)
    names = f"{short_name(q_TNH.dtype)}_{short_name(pages.k_pages.dtype)}"
    function("prefill_attention", names, "ppppplpppplllllffli")(
        q_TNH.data_ptr(),
        out_TNH.data_ptr(),
        starts.data_ptr(),
        tables.lengths.data_ptr(),
        tables.page_table.data_ptr(),
        tables.page_table.stride(0),
        pages.k_pages.data_ptr(),
        pages.v_pages.data_ptr(),
        address(pages.k_scale),
        address(pages.v_scale),
        tables.lengths.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        torch.get_num_threads(),
    )
    return out_TNH
