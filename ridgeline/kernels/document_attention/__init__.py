"""Attention of packed documents, with gradients: torch's fastest kernel for what is given.

Documents of one length go through cuDNN's or flash attention as a batch, others through
`varlen_attn`; a soft cap, which none of these has, windows where this torch's `varlen_attn` has
none, and what must be deterministic through our own kernels. On a CPU each goes through
`scaled_dot_product_attention` alone, on ARM through products in blocks (cpu.py), or with a soft cap
through the definition. No document changes a bit of another.

    out_TNH = document_attention(q, k, v, Documents.of((512, 1536), device), spec)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ridgeline.kernels.attention.reference import AttentionSpec, hidden_from
from ridgeline.kernels.document_attention import cpu, reference
from ridgeline.kernels.document_attention.reference import Documents
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.prefill_attention.reference import Packing
from ridgeline.kernels.prefill_attention.sdpa import (
    CUDNN_MAX_HEAD_DIM,
    any_prompts,
    equal_prompts,
    has_windows,
)

__all__ = ["AttentionPath", "Documents", "choose_path", "document_attention"]

AttentionPath = Literal["cudnn", "flash", "varlen", "triton", "each", "products", "defined"]
HALF_DTYPES = (torch.bfloat16, torch.float16)


def document_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    path: AttentionPath | None = None,
    deterministic: bool = False,
) -> Tensor:
    """As reference.py defines it, in q's dtype; `path` overrules the choice. With `deterministic`
    the gradients have the same bits each time, which torch's kernels do not promise.
    """
    if sum(documents.lengths) != len(q_TNH) or not all(documents.lengths) or not len(q_TNH):
        raise ValueError(
            f"documents have {sum(documents.lengths)} tokens, the shortest "
            f"{min(documents.lengths, default=0)}; they must have all {len(q_TNH)}, and one each"
        )
    path = path or choose_path(q_TNH, documents, spec, deterministic)
    if documents.is_padded and path not in ("varlen", "triton"):
        raise ValueError(f"the path {path!r} needs the lengths of documents on the host")
    if path == "cudnn" or path == "flash":
        return equal_prompts(q_TNH, k_TKH, v_TKH, len(documents.lengths), spec, path)
    if path == "varlen":
        packing = Packing(documents.starts, documents.longest)
        return any_prompts(q_TNH, k_TKH, v_TKH, packing, spec)
    if path == "triton":
        return attend(q_TNH, k_TKH, v_TKH, documents, spec)
    if path == "defined":
        return reference.document_attention(q_TNH, k_TKH, v_TKH, documents, spec)
    run = cpu.attend_by_products if path == "products" else one_document
    parts = documents.each(q_TNH, k_TKH, v_TKH)
    return torch.cat([run(q, k, v, spec) for q, k, v in parts])


def choose_path(
    q_TNH: Tensor, documents: Documents, spec: AttentionSpec, deterministic: bool = False
) -> AttentionPath:
    """cuDNN where it can: on an H200, backward and forward, about 1.5 times flash attention's
    speed and twice `varlen_attn`'s (2026-11-17).
    """
    head_dim = q_TNH.shape[-1]
    if q_TNH.device.type == "cpu":
        if cpu.serves(q_TNH, spec):
            return "products"
        return "each" if spec.softcap is None else "defined"
    if deterministic or spec.softcap is not None:
        return "triton"
    if q_TNH.dtype not in HALF_DTYPES or head_dim % 8:
        return "each"
    windowed = spec.window is not None and spec.window < documents.longest
    if windowed and not has_windows():
        return "triton"
    if not documents.are_equal or windowed:
        return "varlen"
    fits = head_dim <= CUDNN_MAX_HEAD_DIM and target_of(q_TNH).name in ("sm_90", "sm_100")
    return "cudnn" if fits else "flash"


class DocumentAttention(torch.autograd.Function):
    """Our own kernels (triton.py), forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        bounds_T: tuple[Tensor, Tensor],
        spec: AttentionSpec,
    ) -> Tensor:
        from ridgeline.kernels.document_attention import triton

        attended = triton.attend(q_TNH, k_TKH, v_TKH, bounds_T[0], spec)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, *attended, *bounds_T)
        ctx.spec = spec
        return attended.out_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.kernels.document_attention import triton

        q, k, v, out, lse, begins, ends = ctx.saved_tensors
        attended = triton.Attended(out, lse)
        grads = triton.gradients(q, k, v, attended, grad_TNH, (begins, ends), ctx.spec)
        return *grads, None, None


def attend(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, documents: Documents, spec: AttentionSpec
) -> Tensor:
    from ridgeline.kernels.document_attention import triton

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    bounds_T = triton.bounds(documents, len(q_TNH))
    out = DocumentAttention.apply(q, k, v, bounds_T, spec)
    assert isinstance(out, Tensor)
    return out


def one_document(q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, spec: AttentionSpec) -> Tensor:
    length = len(q_LNH)
    mask = None
    if spec.window is not None and spec.window < length:
        hidden = hidden_from(length, length, 0, spec.window, q_LNH.device)
        mask = None if hidden is None else ~hidden
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_LNH, k_LKH, v_LKH))
    out = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
