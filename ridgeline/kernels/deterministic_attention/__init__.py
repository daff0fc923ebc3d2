"""Attention over pages whose bits depend on nothing but a query and its keys: not on the batch, on
how a prompt was cut, or on whether a token came with others or alone.

On a GPU keys come in tiles and splits at fixed positions: triton.py has the kernel of prompts,
decode.py that of decode rows, which gives the same bits, splits.py how keys are cut. On a CPU
`deterministic_attention` is the reference, which is prefill attention's; what the engine runs
there, many sequences at a time, is host.py. op.py is what the registry walks. The engine, which
alone asks for this op, is not compiled, so there is no custom op.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.deterministic_attention.splits import SPLIT
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.prefill_attention import reference
from ridgeline.kernels.prefill_attention.reference import Packing

__all__ = ["deterministic_attention"]


def deterministic_attention(
    q_TNH: Tensor,
    packing: Packing,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
    split_tokens: int = SPLIT,
) -> Tensor:
    """See prefill_attention/reference.py. `tables.order` says that each sequence has one new token;
    `tables.max_length` lets few sequences fill the chip. Only `split_tokens` changes bits.
    """
    if q_TNH.device.type == "cpu":
        return reference.prefill_attention(q_TNH, packing, pages, tables, spec)
    from ridgeline.kernels.deterministic_attention import decode, triton

    if tables.order is not None and decode.fits(q_TNH, pages, tables, spec, split_tokens):
        return decode.decode_rows(q_TNH, pages, tables, spec, split_tokens=split_tokens)
    return triton.prefill_attention(q_TNH, packing, pages, tables, spec, split_tokens=split_tokens)
