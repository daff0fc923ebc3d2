"""The step between the fused projection and attention, defined: q/k norm, rotary embedding, K and V
into pages. Letters: T tokens, N query heads, K KV heads, H head dim, C = (N + 2·K)·H, A angles; P
pages of S tokens (kernels/pages.py has their layout).
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.pages import write_tokens
from ridgeline.kernels.rms_norm.reference import rms_norm
from ridgeline.kernels.rotary.reference import rotate


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
    """Returns q, normed and turned, as a contiguous [T, N, H]; writes K and V of each token into
    its slot, K normed and turned likewise. **Changes the pages and their scales in place.**

    Rows of qkv hold all query heads, then all K heads, then all V heads. Everything is fp32 from
    load to store: q, K and V are rounded once. Without norm weights there is no norm, without
    angles no turning. A token with a negative slot is not written; no two may share a slot.
    """
    num_kv_heads, head_dim = k_pages_PKSH.shape[1], k_pages_PKSH.shape[3]
    heads = qkv_TC.float().unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q_TNH, k_TKH, v_TKH = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_H is not None and k_norm_H is not None:
        q_TNH = _normed(q_TNH, q_norm_H, eps, offset)
        k_TKH = _normed(k_TKH, k_norm_H, eps, offset)
    if cos_TA is not None and sin_TA is not None:
        q_TNH, k_TKH = rotate(q_TNH, cos_TA, sin_TA), rotate(k_TKH, cos_TA, sin_TA)
    write_tokens(k_pages_PKSH, slots_T, k_TKH, k_scale_PKS)
    write_tokens(v_pages_PKSH, slots_T, v_TKH, v_scale_PKS)
    return q_TNH.to(qkv_TC.dtype).contiguous()


def _normed(x: Tensor, weight_H: Tensor, eps: float, offset: float) -> Tensor:
    out = rms_norm(x, weight_H, eps, offset)
    assert isinstance(out, Tensor)
    return out
