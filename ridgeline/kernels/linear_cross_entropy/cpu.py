"""Losses of rows of logits by cpu.cpp; host_library.py builds it. chunks.py says what they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.host_library import function, is_loaded
from ridgeline.kernels.linear_cross_entropy.reference import IGNORED


def serves(logits_CV: Tensor, grad_CV: Tensor | None, softcap: float | None) -> bool:
    """fp32 logits without a soft cap that become their gradient in place."""
    has_memory = type(logits_CV) is Tensor  # fake tensors have none
    if not is_loaded() or not has_memory or softcap is not None:
        return False
    in_place = grad_CV is None or grad_CV.data_ptr() == logits_CV.data_ptr()
    return logits_CV.dtype == torch.float32 and in_place and logits_CV.is_contiguous()


def row_losses(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    grad_CV: Tensor | None,
    logit_scale: float,
) -> None:
    """**The logits are overwritten**, by their gradient where that is wanted."""
    assert losses_C.is_contiguous(), "a part of all rows"
    targets = targets_C.long().contiguous()
    function("linear_cross_entropy", "rows", "pppflllii")(
        logits_CV.data_ptr(),
        targets.data_ptr(),
        losses_C.data_ptr(),
        logit_scale,
        logits_CV.shape[0],
        logits_CV.shape[1],
        IGNORED,
        int(grad_CV is not None),
        torch.get_num_threads(),
    )
