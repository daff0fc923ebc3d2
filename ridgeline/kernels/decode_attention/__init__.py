"""Attention of one new token a sequence over a paged cache: the kernel of every decode step.

`decode_attention` runs where its tensors are: on a CPU the reference, on a GPU the kernel of
cuda.cu or Triton's, whichever was measured to be faster. Where nothing was measured, 8-bit pages on
NVIDIA go to cuda.cu's (conversions are most of Triton's time there), if it was built, and all else
to Triton's. When torch.compile traces it, it is the custom op `ridgeline::decode_attention`. op.py
is what the registry walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.decode_attention import reference
from ridgeline.kernels.pages import Pages, PageTables

__all__ = ["decode_attention", "launched", "tune_key"]


def decode_attention(
    q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """See reference.py."""
    if torch.compiler.is_compiling():
        return traced(
            q_BNH, *pages, *tables, spec.scale, spec.window, spec.softcap, run.split_tokens
        )
    if q_BNH.device.type == "cpu":
        return reference.decode_attention(q_BNH, pages, tables, spec)
    return launched(q_BNH, pages, tables, spec, run)


def launched(
    q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec, run: DecodeRun = PLAIN
) -> Tensor:
    """By a kernel of ours: as `run.config` says (triton.DecodeTiles or cuda.DecodeCut), else as
    measured, else by dtype.
    """
    from ridgeline.kernels.decode_attention import cuda, triton

    # A choice may depend on the batch only where the caller did not ask that results do not.
    if run.config is None and run.split_tokens is None:
        key = tune_key(q_BNH, pages, tables, run.settled)
        best = chosen("decode_attention", key, q_BNH.device)
        if best:
            kind = cuda.DecodeCut if "stages" in best else triton.DecodeTiles
            run = run._replace(config=kind(**best))
    by_dtype = pages.k_pages.dtype.itemsize == 1 and torch.version.hip is None
    in_cuda = by_dtype if run.config is None else isinstance(run.config, cuda.DecodeCut)
    if in_cuda and q_BNH.device.type == "cuda" and cuda.supported(q_BNH, pages):
        return cuda.decode_attention(q_BNH, pages, tables, spec, run)
    if isinstance(run.config, cuda.DecodeCut):
        run = run._replace(config=None)
    return triton.decode_attention(q_BNH, pages, tables, spec, run)


def tune_key(q_BNH: Tensor, pages: Pages, tables: PageTables, settled: bool = False) -> str:
    """Under which a measured choice holds: dtypes and heads as they are, sequences and tokens up to
    the next power of two.
    """
    batch, num_heads, head_dim = q_BNH.shape
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    tokens = tables.page_table.shape[1] * page_size
    longest = tokens if tables.max_length is None else min(tokens, tables.max_length)
    kind = f"{dtype_name(q_BNH.dtype)} {dtype_name(pages.k_pages.dtype)}"
    ranges = [1 << max(number - 1, 0).bit_length() for number in (batch, longest)]
    early = " settled" * settled
    return f"{kind} {num_heads}/{num_kv_heads}x{head_dim} {ranges[0]}x{ranges[1]}{early}"


@torch.library.custom_op("ridgeline::decode_attention", mutates_args=())
def traced(
    q: Tensor,
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
    split_tokens: int | None,
) -> Tensor:
    return decode_attention(
        q,
        Pages(k_pages, v_pages, k_scale, v_scale),
        PageTables(page_table, lengths, max_length, order),
        AttentionSpec(scale, window, softcap),
        DecodeRun(split_tokens),
    )


@traced.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
