"""The sequences of a step on a GPU that is the beginnings of prompts alone, all of one length:
attention has nothing to look up before them, and may be cuDNN's. Letters as in paged.py.

    sequences = FreshPrompts if of_fresh_prompts(plan) else PagedSequences
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.engine.paged import PagedSequences
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.pages import Pages
from ridgeline.kernels.prefill_attention import prefill_attention


class FreshPrompts(PagedSequences):
    def _prompts(self, q_TNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        assert not self.num_decode, f"{self.num_decode} rows are of running streams"
        k, v, k_scale, v_scale = pages
        about = (q_TNH, self.inputs.starts, k, v, self.tables_BP, self.inputs.totals, spec)
        length = len(q_TNH) // len(self.tables_BP)
        return prefill_attention(*about, k_scale, v_scale, length, fresh=True)
