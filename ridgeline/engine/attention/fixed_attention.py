"""The sequences of a step for `deterministic`: attention whose bits do not depend on the batch, on
how a prompt was cut, or on whether a token came with others or alone.

On a GPU keys come in tiles and splits at fixed positions, for prompts and decode rows alike; on a
CPU see cpu_fixed_attention.py. Letters as in paged.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.attention.paged import CpuSequences, PagedSequences
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.deterministic_attention.host import (
    AttentionItems,
    find_items,
    fixed_attention,
)
from ridgeline.kernels.fixed_linear.host import BLOCK, in_blocks
from ridgeline.kernels.pages import Pages
from ridgeline.kernels.prefill_attention import prefill_attention
from ridgeline.kernels.prefill_attention.splits import SPLIT
from ridgeline.kernels.rotary_pages import rotary_pages
from ridgeline.models.transformer import Attention


class FixedSequences(PagedSequences):
    """Decode rows are prompts of one token, which a kernel of their own does with the same sums."""

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        device = self.tables_BP.device
        self.decode_starts = torch.arange(self.num_decode + 1, dtype=torch.int32, device=device)

    def _decode(self, q_DNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        D, longest = self.num_decode, self.max_length
        about = (self.tables_BP[:D], self.inputs.totals[:D], spec, 1, longest, self.inputs.order)
        return _fixed(q_DNH, self.decode_starts, pages, *about)

    def _prompts(self, q_TNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        D = self.num_decode
        about = (self.tables_BP[D:], self.inputs.totals[D:])
        return _fixed(q_TNH, self.inputs.starts, pages, *about, spec)


def _fixed(
    q_TNH: Tensor,
    starts: Tensor,
    pages: Pages,
    tables: Tensor,
    totals: Tensor,
    spec: AttentionSpec,
    max_new: int | None = None,
    max_length: int | None = None,
    order: Tensor | None = None,
) -> Tensor:
    k, v, k_scale, v_scale = pages
    about = (tables, totals, spec, k_scale, v_scale, max_new, SPLIT, max_length, order)
    return prefill_attention(q_TNH, starts, k, v, *about)


class FixedCpuSequences(CpuSequences):
    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.fixed_items: dict[int | None, AttentionItems] = {}  # by window

    def _store(
        self,
        layer: Attention,
        qkv_TC: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        pages: Pages,
    ) -> Tensor:
        """The reference in blocks of tokens; those that fill one up are written nowhere."""
        norms: dict[str, Any] = {}
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = {"q_norm_H": layer.q_norm.weight, "k_norm_H": layer.k_norm.weight}
            norms |= {"eps": layer.q_norm.eps, "offset": layer.q_norm.offset}

        def store(qkv_BC: Tensor, after_B: Tensor, *turns: Tensor) -> Tensor:
            slots_B = (after_B - 1).to(self.inputs.slots.dtype)
            cos_BA, sin_BA = turns or (None, None)
            return rotary_pages(qkv_BC, cos_BA, sin_BA, slots_B, *pages, **norms)

        return in_blocks(store, BLOCK, qkv_TC, self.inputs.slots.long() + 1, *(angles or ()))

    def attend_projected(
        self, layer: Attention, qkv_TC: Tensor, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        pages = self.kv.layers[layer.index]
        q_TNH = self._store(layer, qkv_TC, angles, pages)
        return fixed_attention(
            q_TNH, pages, self._items(layer.spec.window), layer.spec, clean=not self.kv.holds_nan
        )

    def _items(self, window: int | None) -> AttentionItems:
        if window not in self.fixed_items:
            starts = self.starts
            counts = [1] * self.num_decode
            counts += [end - start for start, end in pairwise(starts)]
            firsts = [total - count for total, count in zip(self.totals, counts, strict=True)]
            about = (self.tables_BP.numpy(), firsts, counts, self.kv.page_size)
            self.fixed_items[window] = find_items(*about, window)
        return self.fixed_items[window]
