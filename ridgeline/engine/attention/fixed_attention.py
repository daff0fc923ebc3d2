"""The sequences of a step for `deterministic`: attention whose bits do not depend on the batch, on
how a prompt was cut, or on whether a token came with others or alone.

On a GPU keys come in tiles and splits at fixed positions, for prompts and decode rows alike; on a
CPU see kernels/deterministic_attention/host.py. Letters as in paged.py.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ridgeline.engine.attention.paged import CpuSequences, PagedSequences, norm_of
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.deterministic_attention import deterministic_attention
from ridgeline.kernels.deterministic_attention.host import (
    AttentionItems,
    find_items,
    fixed_attention,
)
from ridgeline.kernels.fixed_linear.host import BLOCK, in_blocks
from ridgeline.kernels.pages import Pages
from ridgeline.kernels.prefill_attention import Packing
from ridgeline.kernels.rotary import Angles
from ridgeline.kernels.rotary_pages import rotary_pages
from ridgeline.models.transformer import Attention


class FixedSequences(PagedSequences):
    """Decode rows are prompts of one token, which a kernel of their own does with the same sums."""

    @cached_property
    def decode_packing(self) -> Packing:
        device = self.tables_BP.device
        starts = torch.arange(self.num_decode + 1, dtype=torch.int32, device=device)
        return Packing(starts, max_new=1)

    def _decode(self, q_DNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        return deterministic_attention(q_DNH, self.decode_packing, pages, self.decode_tables, spec)

    def _prompts(self, q_TNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        return deterministic_attention(q_TNH, self.packing, pages, self.prompt_tables, spec)


class FixedCpuSequences(CpuSequences):
    @cached_property
    def fixed_items(self) -> dict[int | None, AttentionItems]:
        """By window."""
        return {}

    def _store(
        self, layer: Attention, qkv_TC: Tensor, angles: Angles | None, pages: Pages
    ) -> Tensor:
        """The reference in blocks of tokens; those that fill one up are written nowhere."""
        norm = norm_of(layer)

        def store(qkv_BC: Tensor, after_B: Tensor, *cos_sin: Tensor) -> Tensor:
            slots_B = (after_B - 1).to(self.inputs.slots.dtype)
            turned = (cos_sin[0], cos_sin[1]) if cos_sin else None
            return rotary_pages(qkv_BC, turned, slots_B, pages, norm)

        return in_blocks(store, BLOCK, qkv_TC, self.inputs.slots.long() + 1, *(angles or ()))

    def attend_projected(self, layer: Attention, qkv_TC: Tensor, angles: Angles | None) -> Tensor:
        pages = self.kv.layers[layer.index]
        q_TNH = self._store(layer, qkv_TC, angles, pages)
        return fixed_attention(
            q_TNH, pages, self._items(layer.spec.window), layer.spec, clean=not self.kv.holds_nan
        )

    def _items(self, window: int | None) -> AttentionItems:
        if window not in self.fixed_items:
            counts = [1] * self.num_decode
            counts += [end - start for start, end in pairwise(self.starts)]
            firsts = [total - count for total, count in zip(self.totals, counts, strict=True)]
            self.fixed_items[window] = find_items(
                self.tables_BP.numpy(), firsts, counts, self.kv.page_size, window
            )
        return self.fixed_items[window]
