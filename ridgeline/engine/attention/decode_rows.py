"""The sequences of a step on a GPU that is decode rows alone, each of a sequence of its own.

One kernel then takes a layer from its projection to attention's output. It reads the older
tokens of a sequence while it writes the newest, so no other row may be of that sequence. Drafts
that are rows of their stream (flat_plan.py) are, and stay with paged.py, as do steps with prompts.
Letters as in paged.py.

    sequences = DecodeRows if of_own_sequences(plan) else PagedSequences
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.engine.attention.paged import PagedSequences, norm_of
from ridgeline.kernels.attention.decode_run import PLAIN, DecodeRun
from ridgeline.kernels.projected_attention import Projected, in_one_kernel, projected_attention
from ridgeline.kernels.rotary import Angles
from ridgeline.models.transformer import Attention

SETTLED = DecodeRun(settled=True)


class DecodeRows(PagedSequences):
    def attend_projected(self, layer: Attention, qkv_TC: Tensor, angles: Angles | None) -> Tensor:
        assert not self.num_prompt_tokens, f"{self.num_prompt_tokens} tokens are of prompts"
        pages, tables = self.kv.layers[layer.index], self.decode_tables
        if not in_one_kernel(qkv_TC, pages, tables):
            return super().attend_projected(layer, qkv_TC, angles)
        self._note("projected_attention", qkv_TC)
        rows = Projected(qkv_TC, angles, self.inputs.slots, norm_of(layer))
        # The step's start may still write page tables while the first layer's kernels start, and no
        # kernel behind the first layer's attention starts before that has waited for it.
        run = SETTLED if layer.index else PLAIN
        return projected_attention(rows, pages, tables, layer.spec, run)
