"""q/k norm, rotary embedding and K and V into pages by cpu.cpp; host_library.py builds it. See
reference.py for what it is, and for the letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.host_library import address, function, short_name
from ridgeline.kernels.pages import holds_codes
from ridgeline.kernels.rotary_pages import reference

MAX_HEAD_DIM = 512


def rotary_pages(
    qkv_TC: Tensor,
    cos_TA: Tensor | None,
    sin_TA: Tensor | None,
    slots_T: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    q_norm_H: Tensor | None = None,
    k_norm_H: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Tensor:
    """Returns q as [T, N, H]; **changes the pages in place**. Codes and wider heads go to the
    reference.
    """
    num_kv_heads, page_size, head_dim = k_pages_PKSH.shape[1:]
    if holds_codes(k_pages_PKSH.dtype) or head_dim > MAX_HEAD_DIM:
        pages = (k_pages_PKSH, v_pages_PKSH, k_scale_PKS, v_scale_PKS)
        norms = (q_norm_H, k_norm_H, eps, offset)
        return reference.rotary_pages(qkv_TC, cos_TA, sin_TA, slots_T, *pages, *norms)
    qkv_TC = qkv_TC if qkv_TC.stride(1) == 1 else qkv_TC.contiguous()
    num_tokens, width = qkv_TC.shape  # `len` of a tensor is a call of Python: 1 µs, 90 a step
    num_heads = width // head_dim - 2 * num_kv_heads
    q_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TC.dtype)
    names = f"{short_name(qkv_TC.dtype)}_{short_name(k_pages_PKSH.dtype)}"
    function("rotary_pages", names, "plpplpppppffpllllli")(
        qkv_TC.data_ptr(),
        qkv_TC.stride(0),
        address(cos_TA),
        address(sin_TA),
        0 if cos_TA is None else cos_TA.shape[1],
        slots_T.data_ptr(),
        k_pages_PKSH.data_ptr(),
        v_pages_PKSH.data_ptr(),
        address(q_norm_H),
        address(k_norm_H),
        eps,
        offset,
        q_TNH.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        torch.get_num_threads(),
    )
    return q_TNH
