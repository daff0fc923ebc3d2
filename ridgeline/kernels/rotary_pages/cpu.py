"""q/k norm, rotary embedding and K and V into pages by cpu.cpp; host_library.py builds it. See
reference.py for what it is, and for the letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.host_library import function, short_name
from ridgeline.kernels.pages import Pages, holds_codes
from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.rotary_pages import reference
from ridgeline.kernels.rotary_pages.reference import QKNorm

MAX_HEAD_DIM = 512


def rotary_pages(
    qkv_TC: Tensor, angles: Angles | None, slots_T: Tensor, pages: Pages, norm: QKNorm | None = None
) -> Tensor:
    """Returns q as [T, N, H]; **changes the pages in place**. Codes and wider heads go to the
    reference.
    """
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    if holds_codes(pages.k_pages.dtype) or head_dim > MAX_HEAD_DIM:
        return reference.rotary_pages(qkv_TC, angles, slots_T, pages, norm)
    qkv_TC = qkv_TC if qkv_TC.stride(1) == 1 else qkv_TC.contiguous()
    num_tokens, width = qkv_TC.shape  # `len` of a tensor is a call of Python: 1 µs, 90 a step
    num_heads = width // head_dim - 2 * num_kv_heads
    q_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TC.dtype)
    names = f"{short_name(qkv_TC.dtype)}_{short_name(pages.k_pages.dtype)}"
    function("rotary_pages", names, "plpplpppppffpllllli")(
        qkv_TC.data_ptr(),
        qkv_TC.stride(0),
        None if angles is None else angles[0].data_ptr(),
        None if angles is None else angles[1].data_ptr(),
        0 if angles is None else angles[0].shape[1],
        slots_T.data_ptr(),
        pages.k_pages.data_ptr(),
        pages.v_pages.data_ptr(),
        None if norm is None else norm.q_weight.data_ptr(),
        None if norm is None else norm.k_weight.data_ptr(),
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        q_TNH.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        torch.get_num_threads(),
    )
    return q_TNH
