"""Drafting a stream's next tokens by finding its last ones again in what came before.

After a step has sampled, `prompt_lookup` says how many of the last drafts its tokens confirm,
takes the tokens into the table of all tokens, and drafts anew: one launch a step. It runs where
its tensors are: the reference on a CPU, the kernel on a GPU. No custom op: nothing is traced
through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.prompt_lookup import reference
from ridgeline.kernels.prompt_lookup.reference import LONGEST_NGRAM, accepted

__all__ = ["LONGEST_NGRAM", "accepted", "prompt_lookup"]


def prompt_lookup(
    history_SL: Tensor,
    drafts_SK: Tensor,
    tokens_R: Tensor,
    samples_4N: Tensor,
    min_ngram: int,
    max_ngram: int,
    out_3N: Tensor | None = None,
    last_N: Tensor | None = None,
) -> Tensor:
    """Returns [3, N]; **changes `history_SL`, `drafts_SK` and `last_N` in place**. See
    reference.py.
    """
    if history_SL.device.type == "cpu":
        return reference.prompt_lookup(
            history_SL, drafts_SK, tokens_R, samples_4N, min_ngram, max_ngram, out_3N, last_N
        )
    from ridgeline.kernels.prompt_lookup import triton

    return triton.prompt_lookup(
        history_SL, drafts_SK, tokens_R, samples_4N, min_ngram, max_ngram, out_3N, last_N
    )
