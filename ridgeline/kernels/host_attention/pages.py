"""Attention over pages on a CPU, for many sequences at once.

Decode: each page that a sequence sees is one item of a batched product, read where it lies in the
cache when the wanted pages lie close together; the items' results are then put together by their
sums, as splits are on a GPU. Prompts: one dense product a sequence. The definition is that of
kernels/attention; this is the same arithmetic in another order, with products in the pages' dtype.

Letters: B sequences, P pages of one at most, I items, M items of a sequence at most, K KV heads, G
query heads that share one, S tokens a page, H head dim, T new tokens, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.pages import Pages
from ridgeline.products import product_dtype

DENSE_ENOUGH = 1.25  # pages read for each that is wanted, before picking them out pays
LOWEST = torch.finfo(torch.float32).min  # hides a score; -inf would make NaN of an unused item


@dataclass(frozen=True)
class DecodeItems:
    """The pages that one token of each sequence sees."""

    pages: Tensor | None  # [I], to be picked out; None: item i is page i
    num_items: int
    rows: Tensor  # [I]: the sequence of each item
    hidden: Tensor  # [I, S]: where a place holds no token that is seen
    of_row: Tensor  # [B, M]: the items of each sequence, filled up with its first one
    missing: Tensor  # [B, M]: where it was filled up


def decode_items(
    tables_BP: np.ndarray, totals_B: np.ndarray, page_size: int, window: int | None
) -> DecodeItems:
    firsts_B = np.zeros_like(totals_B) if window is None else np.maximum(totals_B - window, 0)
    counts_B = (totals_B - 1) // page_size + 1 - firsts_B // page_size
    rows = np.repeat(np.arange(len(totals_B)), counts_B)
    number = np.arange(len(rows)) - (np.cumsum(counts_B) - counts_B)[rows]  # within its sequence
    indexes = firsts_B[rows] // page_size + number
    pages = tables_BP[rows, indexes]
    positions = indexes[:, None] * page_size + np.arange(page_size)
    hidden = (positions >= totals_B[rows, None]) | (positions < firsts_B[rows, None])
    dense = pages.max() + 1 <= DENSE_ENOUGH * len(pages) and len(np.unique(pages)) == len(pages)
    items = pages if dense else np.arange(len(pages))
    num_items = int(items.max()) + 1
    rows_I = np.zeros(num_items, dtype=np.int64)
    hidden_IS = np.zeros((num_items, page_size), dtype=bool)
    rows_I[items], hidden_IS[items] = rows, hidden
    of_row_BM = np.repeat(items[number == 0][:, None], counts_B.max(), axis=1).astype(np.int64)
    of_row_BM[rows, number] = items
    missing_BM = np.arange(counts_B.max()) >= counts_B[:, None]
    return DecodeItems(
        None if dense else torch.from_numpy(pages),
        num_items,
        *(torch.from_numpy(array) for array in (rows_I, hidden_IS, of_row_BM, missing_BM)),
    )


def decode_attention(
    q_BNH: Tensor, pages: Pages, items: DecodeItems, spec: AttentionSpec, clean: bool = True
) -> Tensor:
    """One query token for each sequence, whose K and V are in the pages. Not `clean`: places that
    hold no token of a sequence may hold NaN, which hiding them does not stop.
    """
    dtype = product_dtype(q_BNH.dtype, q_BNH.device)
    k_IKSH, v_IKSH = (
        picked(values, scale, items.pages, items.num_items, dtype)
        for values, scale in ((pages.k_pages, pages.k_scale), (pages.v_pages, pages.v_scale))
    )
    v_IKSH = v_IKSH if clean else v_IKSH.nan_to_num()
    q_IKGH = q_BNH.unflatten(1, (k_IKSH.shape[1], -1)).index_select(0, items.rows)
    scores_IKGS = _scores(q_IKGH, k_IKSH, items.hidden[:, None, None], spec)
    largest_IKG1 = scores_IKGS.amax(-1, keepdim=True)
    weights_IKGS = scores_IKGS.sub_(largest_IKG1).exp_()
    sums_IKG1 = weights_IKGS.sum(-1, keepdim=True)
    out_IKGH = torch.matmul(weights_IKGS.to(v_IKSH.dtype), v_IKSH)
    out_BKGH = _together(largest_IKG1, sums_IKG1, out_IKGH, items)
    return out_BKGH.flatten(1, 2).to(q_BNH.dtype)


def _together(largest: Tensor, sums: Tensor, out: Tensor, items: DecodeItems) -> Tensor:
    """The items' weighted sums put together, each sequence's own."""
    if items.of_row.shape[1] == 1:
        return (out / sums).index_select(0, items.of_row[:, 0])
    largest_BM = largest[items.of_row].masked_fill_(items.missing[..., None, None, None], LOWEST)
    share_BM = largest_BM.sub_(largest_BM.amax(1, keepdim=True)).exp_()
    share_BM.masked_fill_(items.missing[..., None, None, None], 0.0)
    parts, totals = share_BM * out[items.of_row], share_BM * sums[items.of_row]
    return parts.sum(1) / totals.sum(1)


def prompt_attention(
    q_TNH: Tensor,
    pages: Pages,
    table_P: Tensor,
    total: int,
    spec: AttentionSpec,
    clean: bool = True,
) -> Tensor:
    """The last T of a sequence's `total` tokens, all of which are in the pages; see above."""
    page_size, num_kv_heads = pages.k_pages.shape[2], pages.k_pages.shape[1]
    first = total - q_TNH.shape[0]
    first_page = 0 if spec.window is None else max(0, first - spec.window + 1) // page_size
    wanted_P = table_P[first_page : (total - 1) // page_size + 1]
    k_KLH, v_KLH = (
        picked(values, scale, wanted_P, 0, product_dtype(q_TNH.dtype, q_TNH.device))
        .transpose(0, 1)
        .flatten(1, 2)[:, : total - first_page * page_size]
        for values, scale in ((pages.k_pages, pages.k_scale), (pages.v_pages, pages.v_scale))
    )
    v_KLH = v_KLH if clean else v_KLH.nan_to_num()
    q_KTGH = q_TNH.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
    query_T1 = torch.arange(first, total).unsqueeze(1)
    key_L = torch.arange(first_page * page_size, total)
    hidden_TL = key_L > query_T1
    if spec.window is not None:
        hidden_TL |= key_L <= query_T1 - spec.window
    hidden_ML = hidden_TL.repeat_interleave(q_KTGH.shape[2], dim=0)
    scores_KML = _scores(q_KTGH.flatten(1, 2), k_KLH, hidden_ML, spec)
    out_KMH = torch.matmul(torch.softmax(scores_KML, dim=-1).to(v_KLH.dtype), v_KLH)
    return out_KMH.view(q_KTGH.shape).transpose(0, 1).flatten(1, 2).to(q_TNH.dtype)


def picked(
    values_PKSH: Tensor,
    scale: Tensor | None,
    pages_I: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    """Pages one behind the other; codes as the values they stand for."""
    if pages_I is None:
        values, scale = values_PKSH[:count], None if scale is None else scale[:count]
    else:
        held = values_PKSH.view(torch.uint8) if scale is not None else values_PKSH
        values = held.index_select(0, pages_I).view(values_PKSH.dtype)
        scale = None if scale is None else scale.index_select(0, pages_I)
    return values.to(dtype) if scale is None else (values.float() * scale.unsqueeze(-1)).to(dtype)


def _scores(q: Tensor, k: Tensor, hidden: Tensor, spec: AttentionSpec) -> Tensor:
    scores = torch.matmul(q.to(k.dtype), k.transpose(-1, -2)).float() * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    return scores.masked_fill_(hidden, LOWEST)
