"""Attention of one document on a CPU by plain products, forward and backward: blocks of queries
over the keys that they see, with the scores in memory that is kept for the next block, and the
softmax in between by cpu.cpp, which host_library.py builds.

On ARM torch's own attention takes longer: 512 tokens of 9 heads over 3 take one core 28 ms forward
and 61 backward there, and 23 and 46 here (Neoverse-N1, fp32, 2026-11-18, beside other work).

    out_LNH = attend_by_products(q_LNH, k_LKH, v_LKH, spec)

Letters: L tokens, N query heads, K key-value heads, G query heads of each of those, H head dim,
B queries of a block, E keys that they see, R rows of a block: its queries' heads that share keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.host_library import function, is_loaded
from ridgeline.products import IS_ARM, PIECE, best_products, scratch

BLOCK = 128  # queries: smaller ones skip more of the hidden half, larger ones have faster products
LEAST_BLOCK = 16


def serves(q: Tensor, spec: AttentionSpec) -> bool:
    """Where this was measured to be faster."""
    return IS_ARM and is_loaded() and q.dtype == torch.float32 and spec.softcap is None


@dataclass(frozen=True)
class QueryBlock:
    """Queries of the heads that share one key-value head."""

    queries: slice
    keys: slice  # that any of them sees
    heads: slice
    kv_head: int
    group: int
    window: int  # 0: none

    @property
    def num_rows(self) -> int:
        return (self.queries.stop - self.queries.start) * self.group

    @property
    def num_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """What cpu.cpp has to know: rows, keys, the first query among them, group, window."""
        first = self.queries.start - self.keys.start
        return self.num_rows, self.num_keys, first, self.group, self.window

    def rows(self, x_LNH: Tensor) -> Tensor:
        """[R, H], copied: a query's heads lie end to end."""
        return x_LNH[self.queries, self.heads].reshape(self.num_rows, -1)

    def put(self, out_LNH: Tensor, rows_RH: Tensor) -> None:
        part_BGH = out_LNH[self.queries, self.heads]
        part_BGH.copy_(rows_RH.view(part_BGH.shape))

    def keys_of(self, x_LKH: Tensor) -> Tensor:
        return x_LKH[self.keys, self.kv_head]


def blocks(num_heads: int, k_LKH: Tensor, spec: AttentionSpec) -> Iterator[QueryBlock]:
    length, num_kv_heads, _ = k_LKH.shape
    group = num_heads // num_kv_heads
    size = max(LEAST_BLOCK, min(BLOCK, PIECE // (group * length)))
    window = 0 if spec.window is None or spec.window >= length else spec.window
    for begin in range(0, length, size):
        end = min(begin + size, length)
        first = max(0, begin + 1 - window) if window else 0
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            yield QueryBlock(slice(begin, end), slice(first, end), heads, head, group, window)


def product(use: str, rows: Tensor, keys_EH: Tensor) -> Tensor:
    """[R, E] in kept memory."""
    out = scratch(use, len(rows) * len(keys_EH)).view(len(rows), len(keys_EH))
    return torch.mm(rows, keys_EH.t(), out=out)


def shares(
    rows_RH: Tensor, keys_EH: Tensor, block: QueryBlock, sums_R: Tensor, scale: float, known: bool
) -> Tensor:
    """Each query's shares of the keys [R, E]. `sums_R` is filled, or read where it is known."""
    scores_RE = product("attention scores", rows_RH, keys_EH)
    function("document_attention", "shares", "ppflllllii")(
        scores_RE.data_ptr(),
        sums_R.data_ptr(),
        scale,
        *block.places,
        int(known),
        torch.get_num_threads(),
    )
    return scores_RE


class ProductAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        out_LNH, sums = torch.empty(q_LNH.shape), []
        with best_products(q_LNH):
            for block in blocks(q_LNH.shape[1], k_LKH, spec):
                sums.append(torch.empty(block.num_rows))
                rows_RH, keys_EH = block.rows(q_LNH), block.keys_of(k_LKH)
                weights_RE = shares(rows_RH, keys_EH, block, sums[-1], spec.scale, known=False)
                block.put(out_LNH, torch.mm(weights_RE, block.keys_of(v_LKH)))
        ctx.save_for_backward(q_LNH, k_LKH, v_LKH, *sums)
        ctx.spec = spec
        return out_LNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LNH: Tensor) -> tuple[Tensor | None, ...]:
        q_LNH, k_LKH, v_LKH, *sums = ctx.saved_tensors
        grad_q, scale = torch.empty(q_LNH.shape), ctx.spec.scale
        # [K, L, H]: what a block adds to lies together
        length, num_kv_heads, head_dim = k_LKH.shape
        grad_k, grad_v = (torch.zeros(num_kv_heads, length, head_dim) for _ in range(2))
        with best_products(q_LNH):
            for block, sums_R in zip(blocks(q_LNH.shape[1], k_LKH, ctx.spec), sums, strict=True):
                keys_EH, own = block.keys_of(k_LKH), (block.kv_head, block.keys)
                rows_RH, grads_RH = block.rows(q_LNH), block.rows(grad_LNH)
                weights_RE = shares(rows_RH, keys_EH, block, sums_R, scale, known=True)
                grad_v[own].addmm_(weights_RE.t(), grads_RH)
                grads_RE = product("attention gradients", grads_RH, block.keys_of(v_LKH))
                function("document_attention", "gradients", "ppfllllli")(
                    weights_RE.data_ptr(),
                    grads_RE.data_ptr(),
                    scale,
                    *block.places,
                    torch.get_num_threads(),
                )
                grad_k[own].addmm_(grads_RE.t(), rows_RH)
                block.put(grad_q, torch.mm(grads_RE, keys_EH))
        return grad_q, grad_k.transpose(0, 1), grad_v.transpose(0, 1), None


def attend_by_products(q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, spec: AttentionSpec) -> Tensor:
    """fp32 on a CPU, without a soft cap."""
    out: Any = ProductAttention.apply(q_LNH, k_LKH, v_LKH, spec)
    assert isinstance(out, Tensor)
    return out
