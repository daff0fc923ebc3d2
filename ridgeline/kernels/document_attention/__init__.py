"""Attention of packed documents, with gradients: torch's fastest kernel for what is given.

Documents of one length go through cuDNN's or flash attention as a batch, others through
`varlen_attn`; a soft cap, which none of these has, windows where this torch's `varlen_attn` has
none, and what must be deterministic through our own kernels. On a CPU each goes through
`scaled_dot_product_attention` alone, on ARM through products in blocks (cpu.py), or with a soft cap
through the definition. No document changes a bit of another.

    out_TNH = document_attention(q, k, v, Documents.of((512, 1536), device), spec)

Where a device has some of a document's queries, `keys` says how many keys each of its documents
has: those up to its last query.
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
    aligns_at_end,
    any_prompts,
    equal_prompts,
    has_windows,
)

__all__ = ["AttentionPath", "Documents", "choose_path", "document_attention"]

AttentionPath = Literal["cudnn", "flash", "varlen", "triton", "each", "products", "defined"]
KEYED_PATHS: tuple[AttentionPath, ...] = ("varlen", "triton", "each", "defined")
HALF_DTYPES = (torch.bfloat16, torch.float16)


def document_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    path: AttentionPath | None = None,
    deterministic: bool = False,
    keys: Documents | None = None,
) -> Tensor:
    """As reference.py defines it, in q's dtype; `path` overrules the choice. With `deterministic`
    the gradients have the same bits each time, which torch's kernels do not promise.
    """
    if sum(documents.lengths) != len(q_TNH) or not all(documents.lengths) or not len(q_TNH):
        raise ValueError(
            f"documents have {sum(documents.lengths)} tokens, the shortest "
            f"{min(documents.lengths, default=0)}; they must have all {len(q_TNH)}, and one each"
        )
    check_keys(k_SKH, documents, keys)
    path = path or choose_path(q_TNH, documents, spec, deterministic, keys)
    if documents.is_padded and path not in ("varlen", "triton"):
        raise ValueError(f"the path {path!r} needs the lengths of documents on the host")
    if keys is not None and path not in KEYED_PATHS:
        raise ValueError(f"the path {path!r} needs as many keys as queries")
    if path == "cudnn" or path == "flash":
        return equal_prompts(q_TNH, k_SKH, v_SKH, len(documents.lengths), spec, path)
    if path == "varlen":
        packings = [Packing(each.starts, each.longest) for each in (documents, keys or documents)]
        return any_prompts(q_TNH, k_SKH, v_SKH, packings[0], spec, packings[1])
    if path == "triton":
        return attend(q_TNH, k_SKH, v_SKH, documents, spec, keys)
    if path == "defined":
        return reference.document_attention(q_TNH, k_SKH, v_SKH, documents, spec, keys)
    run = cpu.attend_by_products if path == "products" else one_document
    parts = reference.paired(q_TNH, k_SKH, v_SKH, documents, keys)
    return torch.cat([run(q, k, v, spec) for q, k, v in parts])


def check_keys(k_SKH: Tensor, documents: Documents, keys: Documents | None) -> None:
    lengths = (keys or documents).lengths
    fewer = len(lengths) != len(documents.lengths) or any(
        num_keys < num_queries
        for num_queries, num_keys in zip(documents.lengths, lengths, strict=True)
    )
    if sum(lengths) != len(k_SKH) or fewer:
        raise ValueError(
            f"documents have {sum(lengths)} keys of {len(k_SKH)}; they must have all, and each as "
            "many as queries or more"
        )


def choose_path(
    q_TNH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    deterministic: bool = False,
    keys: Documents | None = None,
) -> AttentionPath:
    """cuDNN where it can: on an H200, backward and forward, about 1.5 times flash attention's
    speed and twice `varlen_attn`'s (2026-11-17).
    """
    head_dim = q_TNH.shape[-1]
    if q_TNH.device.type == "cpu":
        if keys is None and cpu.serves(q_TNH, spec):
            return "products"
        return "each" if spec.softcap is None else "defined"
    if deterministic or spec.softcap is not None:
        return "triton"
    if q_TNH.dtype not in HALF_DTYPES or head_dim % 8:
        return "each"
    windowed = spec.window is not None and spec.window < (keys or documents).longest
    if windowed and not has_windows():
        return "triton"
    if keys is not None:
        return "varlen" if aligns_at_end(q_TNH.device) else "triton"
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
        k_SKH: Tensor,
        v_SKH: Tensor,
        bounds: Any,
        spec: AttentionSpec,
    ) -> Tensor:
        from ridgeline.kernels.document_attention import triton

        attended = triton.attend(q_TNH, k_SKH, v_SKH, bounds, spec)
        ctx.save_for_backward(q_TNH, k_SKH, v_SKH, *attended, *bounds)
        ctx.spec = spec
        return attended.out_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.kernels.document_attention import triton

        q, k, v, out, lse, *bounds = ctx.saved_tensors
        attended = triton.Attended(out, lse)
        grads = triton.gradients(q, k, v, attended, grad_TNH, triton.Bounds(*bounds), ctx.spec)
        return *grads, None, None


def attend(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    keys: Documents | None = None,
) -> Tensor:
    from ridgeline.kernels.document_attention import triton

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_SKH, v_SKH))
    bounds = triton.bounds(documents, len(q_TNH), keys, spec.window)
    out = DocumentAttention.apply(q, k, v, bounds, spec)
    assert isinstance(out, Tensor)
    return out


def one_document(q_LNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, spec: AttentionSpec) -> Tensor:
    """Its last queries, or all."""
    length, num_keys = len(q_LNH), len(k_SKH)
    mask, sees_all = None, False
    if num_keys > length or (spec.window is not None and spec.window < length):
        hidden = hidden_from(length, num_keys, num_keys - length, spec.window, q_LNH.device)
        sees_all = hidden is None
        mask = None if hidden is None else ~hidden
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_LNH, k_SKH, v_SKH))
    out = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and not sees_all,
        scale=spec.scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
