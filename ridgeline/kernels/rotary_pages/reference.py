"""The step between the fused projection and attention, defined: q/k norm, rotary embedding, K and V
into pages. Letters: T tokens, N query heads, K KV heads, H head dim, C = (N + 2·K)·H, A angles; P
pages of S tokens (kernels/pages.py has their layout).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.kernels.pages import Pages, write_tokens
from ridgeline.kernels.rms_norm.reference import rms_norm
from ridgeline.kernels.rotary.reference import Angles, rotate


class QKNorm(NamedTuple):
    """RMS norm of every query and K head before it is turned."""

    q_weight: Tensor  # [H]
    k_weight: Tensor  # [H]
    eps: float = 1e-6
    offset: float = 0.0  # added to the weights


def rotary_pages(
    qkv_TC: Tensor, angles: Angles | None, slots_T: Tensor, pages: Pages, norm: QKNorm | None = None
) -> Tensor:
    """Returns q, normed and turned, as a contiguous [T, N, H]; writes K and V of each token into
    its slot, K normed and turned likewise. **Changes the pages and their scales in place.**

    Rows of qkv hold all query heads, then all K heads, then all V heads. Everything is fp32 from
    load to store: q, K and V are rounded once. `angles` are cos and sin, [T, A] each; without them
    nothing is turned. A token with a negative slot is not written; no two may share a slot.
    """
    num_kv_heads, _, head_dim = pages.k_pages.shape[1:]
    heads = qkv_TC.float().unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q_TNH, k_TKH, v_TKH = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norm is not None:
        q_TNH = _normed(q_TNH, norm.q_weight, norm)
        k_TKH = _normed(k_TKH, norm.k_weight, norm)
    if angles is not None:
        q_TNH, k_TKH = rotate(q_TNH, *angles), rotate(k_TKH, *angles)
    write_tokens(pages.k_pages, slots_T, k_TKH, pages.k_scale)
    write_tokens(pages.v_pages, slots_T, v_TKH, pages.v_scale)
    return q_TNH.to(qkv_TC.dtype).contiguous()


def _normed(x: Tensor, weight_H: Tensor, norm: QKNorm) -> Tensor:
    out = rms_norm(x, weight_H, norm.eps, norm.offset)
    assert isinstance(out, Tensor)
    return out
