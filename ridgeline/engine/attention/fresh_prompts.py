"""The sequences of a step on a GPU that is the beginnings of prompts alone, all of one length: all
their keys and values are in the projection, so that attention need not read them back from pages,
and may be cuDNN's. Letters as in paged.py, and K KV heads.

    sequences = FreshPrompts if of_fresh_prompts(plan) else PagedSequences
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.engine.attention.paged import PagedSequences
from ridgeline.kernels.pages import holds_codes
from ridgeline.kernels.prefill_attention import Packing, prompt_attention
from ridgeline.kernels.prefill_attention.sdpa import choose_path
from ridgeline.kernels.rotary import Angles, rotate
from ridgeline.models.transformer import Attention

LENGTH_STEP = 1024  # only lengths that come again: cuDNN makes a plan for each


class FreshPrompts(PagedSequences):
    def attend_projected(self, layer: Attention, qkv_TC: Tensor, angles: Angles | None) -> Tensor:
        assert not self.num_decode, f"{self.num_decode} rows are of running streams"
        pages = self.kv.layers[layer.index]
        length = len(qkv_TC) // len(self.tables_BP)
        q_TNH, k_TKH, v_TKH = self._heads(qkv_TC, pages.k_pages.shape[1])
        path = choose_path(q_TNH, len(self.tables_BP), layer.spec, length)
        if path == "triton" or length % LENGTH_STEP or holds_codes(pages.k_pages.dtype):
            return super().attend_projected(layer, qkv_TC, angles)
        self._note("rotary_pages", qkv_TC)
        q_TNH = self._store(layer, qkv_TC, angles, pages)
        if layer.k_norm is not None:
            k_TKH = layer.k_norm(k_TKH)
        if angles is not None:
            self._note("rotary", k_TKH)
            k_TKH = rotate(k_TKH, *angles)
        self._note("prefill_attention", q_TNH)
        packing = Packing(self.inputs.starts, length)
        return prompt_attention(q_TNH, k_TKH, v_TKH, packing, layer.spec)

    def _heads(self, qkv_TC: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        heads_TXH = qkv_TC.unflatten(-1, (-1, self.kv.layers[0].k_pages.shape[3]))
        num_heads = heads_TXH.shape[1] - 2 * num_kv_heads
        q_TNH, k_TKH, v_TKH = heads_TXH.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q_TNH, k_TKH, v_TKH
