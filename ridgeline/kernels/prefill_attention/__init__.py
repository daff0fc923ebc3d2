"""Attention of many new tokens at once: prompts, and chunks of prompts over a paged prefix.

`prefill_attention` reads a paged cache in which the new tokens already are; `prompt_attention`
takes fresh prompts with K and V packed like the queries, and may hand them to cuDNN (sdpa.py).
Both run where their tensors are: the reference on a CPU, kernels on a GPU, through custom ops when
torch.compile traces them. op.py is what the registry walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.prefill_attention import reference, sdpa
from ridgeline.kernels.prefill_attention.reference import Packing

__all__ = ["Packing", "prefill_attention", "prompt_attention"]


def prefill_attention(
    q_TNH: Tensor, packing: Packing, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """See reference.py."""
    if torch.compiler.is_compiling():
        return traced_prefill(
            q_TNH,
            *packing,
            *pages,
            tables.page_table,
            tables.lengths,
            spec.scale,
            spec.window,
            spec.softcap,
        )
    if q_TNH.device.type == "cpu":
        return reference.prefill_attention(q_TNH, packing, pages, tables, spec)
    from ridgeline.kernels.prefill_attention import triton

    return triton.prefill_attention(q_TNH, packing, pages, tables, spec)


def prompt_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packing: Packing, spec: AttentionSpec
) -> Tensor:
    """See reference.py. With the longest prompt's length known, cuDNN can be chosen."""
    if torch.compiler.is_compiling():
        return traced_prompt(q_TNH, k_TKH, v_TKH, *packing, spec.scale, spec.window, spec.softcap)
    if q_TNH.device.type == "cpu":
        return reference.prompt_attention(q_TNH, k_TKH, v_TKH, packing, spec)
    if sdpa.choose_path(q_TNH, packing.num_sequences, spec, packing.max_new) == "cudnn":
        return sdpa.equal_prompts(q_TNH, k_TKH, v_TKH, packing.num_sequences, spec)
    from ridgeline.kernels.prefill_attention import triton

    return triton.prompt_attention(q_TNH, k_TKH, v_TKH, packing, spec)


@torch.library.custom_op("ridgeline::prefill_attention", mutates_args=())
def traced_prefill(
    q: Tensor,
    starts: Tensor,
    max_new: int | None,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    return prefill_attention(
        q,
        Packing(starts, max_new),
        Pages(k_pages, v_pages, k_scale, v_scale),
        PageTables(page_table, lengths),
        AttentionSpec(scale, window, softcap),
    )


@torch.library.custom_op("ridgeline::prompt_attention", mutates_args=())
def traced_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    max_new: int | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    spec = AttentionSpec(scale, window, softcap)
    return prompt_attention(q, k, v, Packing(starts, max_new), spec)


@traced_prefill.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@traced_prompt.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
