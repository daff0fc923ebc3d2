"""Attention of packed documents, with gradients: torch's fastest kernel for what is given.

Documents of one length go through cuDNN's or flash attention as a batch, others through
`varlen_attn`; on a CPU each goes through `scaled_dot_product_attention` alone, so that no document
changes a bit of another. A soft cap, which none of these has, goes through the definition. (Not yet
in the registry: it has no kernel of its own.)

    out_TNH = document_attention(q, k, v, Documents.of((512, 1536), device), spec)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.attention.reference import AttentionSpec, hidden_from
from ridgeline.kernels.document_attention import reference
from ridgeline.kernels.document_attention.reference import Documents
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.prefill_attention.reference import Packing
from ridgeline.kernels.prefill_attention.sdpa import (
    CUDNN_MAX_HEAD_DIM,
    any_prompts,
    equal_prompts,
)

__all__ = ["AttentionPath", "Documents", "choose_path", "document_attention"]

AttentionPath = Literal["cudnn", "flash", "varlen", "each", "defined"]
HALF_DTYPES = (torch.bfloat16, torch.float16)


def document_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    path: AttentionPath | None = None,
) -> Tensor:
    """As reference.py defines it, in q's dtype; `path` overrules the choice."""
    if sum(documents.lengths) != len(q_TNH) or not all(documents.lengths) or not len(q_TNH):
        raise ValueError(
            f"documents have {sum(documents.lengths)} tokens, the shortest "
            f"{min(documents.lengths, default=0)}; they must have all {len(q_TNH)}, and one each"
        )
    path = path or choose_path(q_TNH, documents, spec)
    if path == "cudnn" or path == "flash":
        return equal_prompts(q_TNH, k_TKH, v_TKH, len(documents.lengths), spec, path)
    if path == "varlen":
        packing = Packing(documents.starts, documents.longest)
        return any_prompts(q_TNH, k_TKH, v_TKH, packing, spec)
    if path == "defined":
        return reference.document_attention(q_TNH, k_TKH, v_TKH, documents, spec)
    parts = documents.each(q_TNH, k_TKH, v_TKH)
    return torch.cat([one_document(q, k, v, spec) for q, k, v in parts])


def choose_path(q_TNH: Tensor, documents: Documents, spec: AttentionSpec) -> AttentionPath:
    """cuDNN where it can: on an H200, backward and forward, about 1.5 times flash attention's
    speed and twice `varlen_attn`'s (2026-11-17).
    """
    if spec.softcap is not None:
        return "defined"
    head_dim = q_TNH.shape[-1]
    if q_TNH.device.type == "cpu" or q_TNH.dtype not in HALF_DTYPES or head_dim % 8:
        return "each"
    windowed = spec.window is not None and spec.window < documents.longest
    if not documents.are_equal or windowed:
        return "varlen"
    fits = head_dim <= CUDNN_MAX_HEAD_DIM and target_of(q_TNH).name in ("sm_90", "sm_100")
    return "cudnn" if fits else "flash"


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
