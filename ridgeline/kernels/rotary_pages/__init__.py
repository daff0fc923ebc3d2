"""Between the fused projection and attention: q/k norm, rotary embedding, K and V into pages.

`rotary_pages` runs where its tensors are: the reference on a CPU, the kernel on a GPU, through the
custom op `ridgeline::rotary_pages` when torch.compile traces it. It has no gradient: pages belong
to serving. kernels/pages.py has their layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.rotary_pages import reference

__all__ = ["rotary_pages"]


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
    """Returns q as [T, N, H]; **changes the pages and scales in place**. See reference.py."""
    inputs = (qkv_TC, cos_TA, sin_TA, slots_T, k_pages_PKSH, v_pages_PKSH)
    optional = (k_scale_PKS, v_scale_PKS, q_norm_H, k_norm_H)
    if qkv_TC.device.type == "cpu":
        return reference.rotary_pages(*inputs, *optional, eps, offset)
    if torch.compiler.is_compiling():
        return traced_rotary_pages(*inputs, *optional, eps, offset)
    from ridgeline.kernels.rotary_pages import triton

    return triton.rotary_pages(*inputs, *optional, eps, offset)


@torch.library.custom_op(
    "ridgeline::rotary_pages", mutates_args=("k_pages", "v_pages", "k_scale", "v_scale")
)
def traced_rotary_pages(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> Tensor:
    from ridgeline.kernels.rotary_pages import triton

    return triton.rotary_pages(
        qkv, cos, sin, slots, k_pages, v_pages, k_scale, v_scale, q_norm, k_norm, eps, offset
    )


@traced_rotary_pages.register_fake
def _(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> Tensor:
    num_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
