"""The sequences of a step on a CPU, through the CPU kernels: one call stores the new tokens of all
sequences, one attends. Letters as in paged.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.engine.attention.paged import PagedSequences, norm_of
from ridgeline.kernels.pages import PageTables
from ridgeline.kernels.prefill_attention import Packing
from ridgeline.kernels.prefill_attention.cpu import prefill_attention, supported
from ridgeline.kernels.rotary import Angles
from ridgeline.kernels.rotary_pages.cpu import rotary_pages
from ridgeline.models.transformer import Attention


class HostSequences(PagedSequences):
    whole_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        decode = torch.arange(self.num_decode, dtype=torch.int32)
        # Decode rows are rows here.
        self.all_rows = Packing(torch.cat((decode, self.inputs.starts + self.num_decode)))
        self.all_tables = PageTables(self.tables_BP, self.inputs.totals)

    @staticmethod
    def serves(kv: KVCache, dtype: torch.dtype) -> bool:
        """Whether the kernels know these pages, for a model in this dtype."""
        k_pages = kv.layers[0].k_pages
        return supported(dtype, k_pages.dtype, k_pages.shape[3])

    def attend_projected(self, layer: Attention, qkv_TC: Tensor, angles: Angles | None) -> Tensor:
        pages = self.kv.layers[layer.index]
        self._note("rotary_pages", qkv_TC)
        q_TNH = rotary_pages(qkv_TC, angles, self.inputs.slots, pages, norm_of(layer))
        self._note("prefill_attention", q_TNH)
        return prefill_attention(q_TNH, self.all_rows, pages, self.all_tables, layer.spec)
