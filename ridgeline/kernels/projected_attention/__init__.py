"""From the fused projection to attention's output in a decode step: norm, rotary embedding, the
newest K and V into pages and decode attention, for one new token a sequence.

`projected_attention` runs where its tensors are: on a CPU the references, on a GPU one kernel, of
CUDA C++ (cuda.py) or Triton, or rotary_pages and decode_attention one after the other (`Apart`),
whichever was measured to be faster. Where nothing was measured, pages of values take the one kernel
and pages of 8-bit codes the two, because decode_attention has a faster kernel for them in cuda.cu;
so few sequences that clusters leave no SM without a block go to CUDA C++. `in_one_kernel` says
which it will be. When torch.compile traces it, it is the custom op
`ridgeline::projected_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels import decode_attention as decoding
from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.pages import Pages, PageTables, holds_codes
from ridgeline.kernels.projected_attention import reference
from ridgeline.kernels.projected_attention.reference import Projected
from ridgeline.kernels.rotary_pages import NO_NORM, angles_of, new_queries, norm_of

__all__ = [
    "Apart",
    "Projected",
    "choose_config",
    "in_one_kernel",
    "launched",
    "projected_attention",
    "queries_of",
    "tune_key",
]


@dataclass(frozen=True)
class Apart:
    """Two kernels, rotary_pages and decode_attention: each has its own choices."""

    kernels: int = 2


def projected_attention(
    rows: Projected, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """Returns [B, N, H]; **changes the pages and scales in place**. See reference.py: no two rows
    may be of one sequence.
    """
    if torch.compiler.is_compiling():
        cos, sin = rows.angles if rows.angles is not None else (None, None)
        norm = rows.norm if rows.norm is not None else NO_NORM
        return traced(
            rows.qkv,
            cos,
            sin,
            rows.slots,
            *pages,
            *tables,
            spec.scale,
            spec.window,
            spec.softcap,
            *norm,
            run.split_tokens,
        )
    if rows.qkv.device.type == "cpu":
        return reference.projected_attention(rows, pages, tables, spec)
    return launched(rows, pages, tables, spec, run)


def launched(
    rows: Projected, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """By kernels of ours: as `run.config` says (cuda.Clustered, triton.Fused or Apart), else as
    measured, else by dtype and size.
    """
    from ridgeline.kernels.projected_attention import cuda, triton
    from ridgeline.kernels.rotary_pages import triton as storing

    config = run.config
    if config is None:
        config = choose_config(rows.qkv, pages, tables, run.split_tokens)
    if isinstance(config, cuda.Clustered):
        try:
            own = run._replace(config=config)
            return cuda.projected_attention(rows, pages, tables, spec, own)
        except UnsupportedError:
            if run.config is not None:
                raise
            config = None  # Triton's kernel takes everything
    if isinstance(config, Apart):
        q_BNH = storing.rotary_pages(rows.qkv, rows.angles, rows.slots, pages, rows.norm)
        return decoding.launched(q_BNH, pages, tables, spec, DecodeRun(run.split_tokens))
    return triton.projected_attention(rows, pages, tables, spec, run._replace(config=config))


def in_one_kernel(qkv_BC: Tensor, pages: Pages, tables: PageTables) -> bool:
    """Whether that is what is launched for such inputs, without `split_tokens`."""
    return not isinstance(choose_config(qkv_BC, pages, tables), Apart)


def choose_config(
    qkv_BC: Tensor, pages: Pages, tables: PageTables, split_tokens: int | None = None
) -> Any:
    """Apart, a cuda.Clustered, a triton.Fused, or None: Triton's kernel by its own heuristic."""
    by_dtype = Apart() if holds_codes(pages.k_pages.dtype) else None
    # A choice may depend on the batch only where the caller did not ask that results do not.
    if split_tokens is not None:
        return by_dtype
    from ridgeline.kernels.projected_attention import cuda, triton

    def in_cuda() -> bool:
        return cuda.unsupported(qkv_BC, pages) is None

    key = tune_key(qkv_BC, pages, tables)
    best = chosen(
        "projected_attention",
        key,
        qkv_BC.device,
        lambda config: "blocks" not in config or in_cuda(),
    )
    if best is not None:
        kind = Apart if "kernels" in best else cuda.Clustered if "blocks" in best else triton.Fused
        return kind(**best)
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    clustered = cuda.choose(
        len(qkv_BC) * num_kv_heads,
        tables.longest(page_size),
        head_dim,
        pages.k_pages.dtype,
        target_of(qkv_BC),
    )
    return clustered if clustered is not None and in_cuda() else by_dtype


def tune_key(qkv_BC: Tensor, pages: Pages, tables: PageTables) -> str:
    """Under which a measured choice holds: decode_attention's, for queries of these heads."""
    return decoding.tune_key(queries_of(qkv_BC, pages), pages, tables)


def queries_of(qkv_BC: Tensor, pages: Pages) -> Tensor:
    """The query heads of a projection, [B, N, H]."""
    num_kv_heads, _, head_dim = pages.k_pages.shape[1:]
    num_heads = qkv_BC.shape[1] // head_dim - 2 * num_kv_heads
    return qkv_BC[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


@torch.library.custom_op(
    "ridgeline::projected_attention", mutates_args=("k_pages", "v_pages", "k_scale", "v_scale")
)
def traced(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    max_length: int | None,
    order: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
    split_tokens: int | None,
) -> Tensor:
    return projected_attention(
        Projected(qkv, angles_of(cos, sin), slots, norm_of(q_norm, k_norm, eps, offset)),
        Pages(k_pages, v_pages, k_scale, v_scale),
        PageTables(page_table, lengths, max_length, order),
        AttentionSpec(scale, window, softcap),
        DecodeRun(split_tokens),
    )


@traced.register_fake
def _(qkv: Tensor, cos: object, sin: object, slots: object, k_pages: Tensor, *_: object) -> Tensor:
    return new_queries(qkv, k_pages)
