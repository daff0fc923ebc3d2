"""Between the fused projection and attention: q/k norm, rotary embedding, K and V into pages.

`rotary_pages` runs where its tensors are: the reference on a CPU, the kernel on a GPU, through the
custom op `ridgeline::rotary_pages` when torch.compile traces it. It has no gradient: pages belong
to serving. kernels/pages.py has their layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.pages import Pages
from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.rotary_pages import reference
from ridgeline.kernels.rotary_pages.reference import QKNorm

__all__ = ["QKNorm", "rotary_pages"]

NO_NORM = (None, None, 0.0, 0.0)  # what a custom op is given for QKNorm's fields


def rotary_pages(
    qkv_TC: Tensor, angles: Angles | None, slots_T: Tensor, pages: Pages, norm: QKNorm | None = None
) -> Tensor:
    """Returns q as [T, N, H]; **changes the pages and scales in place**. See reference.py."""
    if qkv_TC.device.type == "cpu":
        return reference.rotary_pages(qkv_TC, angles, slots_T, pages, norm)
    if torch.compiler.is_compiling():
        cos_TA, sin_TA = angles if angles is not None else (None, None)
        return traced_rotary_pages(
            qkv_TC,
            cos_TA,
            sin_TA,
            slots_T,
            *pages,
            *(norm if norm is not None else NO_NORM),
        )
    from ridgeline.kernels.rotary_pages import triton

    return triton.rotary_pages(qkv_TC, angles, slots_T, pages, norm)


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

    pages = Pages(k_pages, v_pages, k_scale, v_scale)
    norm = norm_of(q_norm, k_norm, eps, offset)
    return triton.rotary_pages(qkv, angles_of(cos, sin), slots, pages, norm)


@traced_rotary_pages.register_fake
def _(qkv: Tensor, cos: object, sin: object, slots: object, k_pages: Tensor, *_: object) -> Tensor:
    return new_queries(qkv, k_pages)


def angles_of(cos: Tensor | None, sin: Tensor | None) -> Angles | None:
    """From a custom op's arguments, which are tensors and numbers only; so are the next two."""
    return (cos, sin) if cos is not None and sin is not None else None


def norm_of(
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float
) -> QKNorm | None:
    if q_norm is None or k_norm is None:
        return None
    return QKNorm(q_norm, k_norm, eps, offset)


def new_queries(qkv: Tensor, k_pages: Tensor) -> Tensor:
    """The shape of a result [T, N, H]."""
    num_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
