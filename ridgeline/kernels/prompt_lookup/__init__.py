"""Drafting a stream's next tokens by finding its last ones again in what came before.

After a step has sampled, `prompt_lookup` says how many of the last drafts its tokens confirm,
takes the tokens into the table of all tokens, and drafts anew: one launch a step. It runs where
its tensors are: the reference on a CPU, the kernel on a GPU. No custom op: nothing is traced
through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.prompt_lookup import reference
from ridgeline.kernels.prompt_lookup.reference import (
    LONGEST_NGRAM,
    LookupResults,
    Streams,
    accepted,
)

__all__ = ["LONGEST_NGRAM", "LookupResults", "Streams", "accepted", "prompt_lookup"]


def prompt_lookup(
    streams: Streams, tokens_R: Tensor, samples_4N: Tensor, into: LookupResults | None = None
) -> Tensor:
    """Returns [3, N]; **changes `streams` and `into` in place**. See reference.py."""
    if streams.history.device.type == "cpu":
        return reference.prompt_lookup(streams, tokens_R, samples_4N, into)
    from ridgeline.kernels.prompt_lookup import triton

    return triton.prompt_lookup(streams, tokens_R, samples_4N, into)
