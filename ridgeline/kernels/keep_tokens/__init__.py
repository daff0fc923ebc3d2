"""Leaving the tokens that a step has chosen where the host and the next step look for them, with a
note of those whose logits were no numbers: one launch.

`keep_tokens` runs where its tensors are: the reference on a CPU, the kernel on a GPU. No custom op:
nothing is traced through it.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.keep_tokens import reference

__all__ = ["keep_tokens"]


def keep_tokens(
    logits_RV: Tensor, tokens_R: Tensor, results_2N: Tensor, last_N: Tensor | None = None
) -> None:
    """**Changes `results_2N` and `last_N` in place.** See reference.py."""
    if logits_RV.device.type == "cpu":
        return reference.keep_tokens(logits_RV, tokens_R, results_2N, last_N)
    from ridgeline.kernels.keep_tokens import triton

    return triton.keep_tokens(logits_RV, tokens_R, results_2N, last_N)
