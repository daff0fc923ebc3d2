"""Attention over pages on a CPU whose results do not depend on the batch: every query meets the
same keys in the same groups, in products of one shape.

Queries of a sequence stand in blocks of QUERIES at fixed positions, a query alone too: its place in
the block follows from its position. A pair of a block and a page is an item; ITEMS items make one
batched product, the last ones repeated to fill up. A block's items are put together one after the
other in the order of their pages, so a page that a query does not see adds nothing to it: a weight
of zero to sums multiplied by one. All of it is in fp32.

Letters: T tokens of the step, B blocks, I items, Q queries of a block, K KV heads, G query heads
that share one, M = Q · G, S tokens a page, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.host_attention.pages import picked
from ridgeline.kernels.pages import Pages

QUERIES = 8
ITEMS = 16
AT_ONCE = 512  # items whose results are held before they are put together


@dataclass(frozen=True)
class AttentionItems:
    """The blocks of a step's queries, and the pages they see."""

    tokens: Tensor  # [B, Q]: which token; T where there is none
    positions: Tensor  # [B, Q]; -1 where there is none
    blocks: np.ndarray  # [I], sorted by how many of its block's items come before, then by block
    orders: np.ndarray  # [I]: that number
    pages: np.ndarray  # [I]
    first_keys: np.ndarray  # [I]: the position of the page's first token


def find_items(
    tables_RP: np.ndarray,
    firsts: Sequence[int],
    counts: Sequence[int],
    page_size: int,
    window: int | None,
) -> AttentionItems:
    """For rows whose tokens stand end to end: first positions, and how many tokens each has."""
    tokens, positions = [], []
    blocks, orders, pages, keys = [], [], [], []
    token, num_tokens = 0, sum(counts)
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        for start in range(first - first % QUERIES, first + count, QUERIES):
            own = np.arange(start, start + QUERIES)
            there = (own >= first) & (own < first + count)
            tokens.append(np.where(there, own - first + token, num_tokens))
            positions.append(np.where(there, own, -1))
            low, high = own[there].min(), own[there].max()
            begin = 0 if window is None else max(0, low - window + 1) // page_size
            visible = np.arange(begin, high // page_size + 1)
            blocks.append(np.full(len(visible), len(tokens) - 1))
            orders.append(np.arange(len(visible)))
            pages.append(tables_RP[row, visible])
            keys.append(visible * page_size)
        token += count
    order = np.lexsort((np.concatenate(blocks), np.concatenate(orders)))
    return AttentionItems(
        torch.from_numpy(np.stack(tokens)),
        torch.from_numpy(np.stack(positions)),
        *(np.concatenate(parts)[order] for parts in (blocks, orders, pages, keys)),
    )


def fixed_attention(
    q_TNH: Tensor, pages: Pages, items: AttentionItems, spec: AttentionSpec, clean: bool = True
) -> Tensor:
    """Every query over the keys up to its own, all of which are in the pages. Not `clean`: places
    that hold no token of a sequence may hold NaN, which hiding them does not stop.
    """
    num_kv_heads = pages.k_pages.shape[1]
    filled = torch.cat((q_TNH.float(), q_TNH.new_zeros(1, *q_TNH.shape[1:]).float()))
    q_BQKGH = filled[items.tokens].unflatten(2, (num_kv_heads, -1))
    q_BKMH = q_BQKGH.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
    largest = torch.full((*q_BKMH.shape[:3], 1), float("-inf"))
    total, out_BKMH = torch.zeros_like(largest), torch.zeros_like(q_BKMH)
    for start in range(0, len(items.blocks), AT_ONCE):
        chosen = slice(start, start + AT_ONCE)
        results = _of_items(q_BKMH, pages, items, chosen, spec, clean)
        _put_together(largest, total, out_BKMH, items.blocks[chosen], items.orders[chosen], results)
    out_BKMH /= torch.where(total > 0, total, 1.0)
    out_BQNH = out_BKMH.view(*out_BKMH.shape[:2], QUERIES, -1, q_TNH.shape[2])
    out_BQNH = out_BQNH.permute(0, 2, 1, 3, 4).flatten(2, 3)
    out_TNH = torch.empty((len(q_TNH) + 1, *q_TNH.shape[1:]), dtype=q_TNH.dtype)
    out_TNH[items.tokens] = out_BQNH.to(q_TNH.dtype)
    return out_TNH[:-1]


def _of_items(
    q_BKMH: Tensor,
    pages: Pages,
    items: AttentionItems,
    chosen: slice,
    spec: AttentionSpec,
    clean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each item's largest score and its sums of weights and of weighted values, as many at a time
    as one product has.
    """
    count = len(items.blocks[chosen])
    size = items_at_once(*q_BKMH.shape[1:], pages.k_pages.shape[2], torch.get_num_threads())
    parts = []
    for start in range(0, count, size):
        numbers = np.minimum(np.arange(start, start + size), count - 1) + chosen.start
        blocks = torch.from_numpy(items.blocks[numbers])
        wanted = torch.from_numpy(items.pages[numbers].astype(np.int64))
        k_IKSH, v_IKSH = (
            picked(values, scale, wanted, 0, torch.float32)
            for values, scale in ((pages.k_pages, pages.k_scale), (pages.v_pages, pages.v_scale))
        )
        keys_IS = torch.from_numpy(items.first_keys[numbers])[:, None] + torch.arange(
            k_IKSH.shape[2]
        )
        hidden_IQS = _hidden(items.positions[blocks], keys_IS, spec.window)
        group = q_BKMH.shape[2] // QUERIES
        hidden_I1MS = hidden_IQS.repeat_interleave(group, dim=1).unsqueeze(1)
        v_IKSH = v_IKSH if clean else v_IKSH.nan_to_num()
        parts.append(_one_product(q_BKMH[blocks], k_IKSH, v_IKSH, hidden_I1MS, spec))
    largest, sums, out = (torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True))
    return largest, sums, out


def _hidden(positions_IQ: Tensor, keys_IS: Tensor, window: int | None) -> Tensor:
    queries_IQ1, keys_I1S = positions_IQ.unsqueeze(2), keys_IS.unsqueeze(1)
    hidden = keys_I1S > queries_IQ1
    return hidden if window is None else hidden | (keys_I1S <= queries_IQ1 - window)


def _one_product(
    q_IKMH: Tensor, k_IKSH: Tensor, v_IKSH: Tensor, hidden: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _batched(q_IKMH, k_IKSH.transpose(2, 3)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(hidden, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest == float("-inf"), 0.0, largest))
    return largest, weights.sum(-1, keepdim=True), _batched(weights, v_IKSH)


def _batched(a_IKMX: Tensor, b_IKXN: Tensor) -> Tensor:
    return torch.bmm(a_IKMX.flatten(0, 1), b_IKXN.flatten(0, 1)).unflatten(0, a_IKMX.shape[:2])


def _put_together(
    largest: Tensor,
    total: Tensor,
    out: Tensor,
    blocks: np.ndarray,
    orders: np.ndarray,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add items to their blocks, in place, the first of each block before the second."""
    bounds = [0, *(np.flatnonzero(np.diff(orders)) + 1).tolist(), len(orders)]
    for start, end in pairwise(bounds):
        where = torch.from_numpy(blocks[start:end])
        new_largest, new_total, new_out = (part[start:end] for part in results)
        before = largest[where]
        larger = torch.maximum(before, new_largest)
        shift = torch.where(larger == float("-inf"), 0.0, larger)
        old, new = torch.exp(before - shift), torch.exp(new_largest - shift)
        total[where] = total[where] * old + new_total * new
        out[where] = out[where] * old + new_out * new
        largest[where] = larger


@cache
def items_at_once(num_kv_heads: int, M: int, H: int, S: int, num_threads: int) -> int:
    """ITEMS where an item gives the same bits in each place among any others; else one."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_kv_heads, M, H), (num_kv_heads, S, H), (num_kv_heads, S, H))
    own = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for place in range(ITEMS):
        batch = [torch.randn(ITEMS, *shape, generator=generator) for shape in shapes]
        for tensor, item in zip(batch, own, strict=True):
            tensor[place] = item
        hidden = torch.zeros(ITEMS, 1, M, S, dtype=torch.bool)
        q, k, v = batch
        result = _one_product(q, k, v, hidden, AttentionSpec(H**-0.5))
        results.append([part[place] for part in result])
    same = all(
        torch.equal(part, parts[0]) for parts in zip(*results, strict=True) for part in parts
    )
    return ITEMS if same else 1
