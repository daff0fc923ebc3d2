"""The loss of a head and its gradients, some rows at a time: logits of all rows never exist.

A chunk's logits come from one large product, become their own gradient in place, and two more
products take that to x and to the weight, whose gradient is summed in fp32 over all chunks.
Everything happens in one order: the same inputs give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.linear_cross_entropy import cpu
from ridgeline.kernels.linear_cross_entropy.reference import IGNORED
from ridgeline.products import add_product, product_dtype

log = logging.getLogger(__name__)

# Of one chunk's logits. 1 GiB is 4,096 rows of Llama 3's vocabulary in bf16: products of that many
# rows run at full speed on an H200.
GPU_CHUNK_BYTES, CPU_CHUNK_BYTES = 1 << 30, 64 << 20

# logits, targets, losses (filled), gradient (filled, or None), logit scale, soft cap
RowLosses = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float | None], None]


@dataclass(frozen=True)
class LossPlan:
    """Which gradients are computed beside the loss, and in what the logits are held."""

    grad_x: bool = False
    grad_weight: bool = False
    # fp32 logits: no rounding before the softmax, for twice their memory (None: as x).
    logits_dtype: torch.dtype | None = None
    chunk_rows: int | None = None  # rows at a time (None: as many as a chunk's bytes allow)


@dataclass(frozen=True)
class ChunkedLoss:
    losses_T: Tensor  # fp32; 0 where the target is ignored
    grad_x_TD: Tensor | None  # of the sum of losses, in x's dtype
    grad_weight_VD: Tensor | None  # likewise, in fp32


def losses_and_gradients(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    logit_scale: float,
    softcap: float | None,
    row_losses: RowLosses,
    plan: LossPlan,
) -> ChunkedLoss:
    num_rows, vocab_size = x_TD.shape[0], weight_VD.shape[0]
    dtype = product_dtype(x_TD.dtype, x_TD.device)
    weight = weight_VD.to(dtype)
    logits_dtype = plan.logits_dtype or dtype
    device = x_TD.device
    rows = min(num_rows, plan.chunk_rows or chunk_rows(vocab_size, logits_dtype, device))
    has_gradient = plan.grad_x or plan.grad_weight
    losses_T = torch.empty(num_rows, dtype=torch.float32, device=device)
    grad_x = torch.empty(x_TD.shape if plan.grad_x else 0, dtype=x_TD.dtype, device=device)
    grad_weight = torch.zeros(weight.shape if plan.grad_weight else 0, device=device)
    logits = torch.empty(rows, vocab_size, dtype=logits_dtype, device=device)
    grad = logits if logits_dtype == dtype else torch.empty_like(logits, dtype=dtype)
    for start in range(0, num_rows, max(rows, 1)):
        part = slice(start, min(start + rows, num_rows))
        x_CD = x_TD[part].to(dtype)
        logits_CV, grad_CV = logits[: len(x_CD)], grad[: len(x_CD)]
        product_into(logits_CV, x_CD, weight.t())
        row_losses(
            logits_CV,
            targets_T[part],
            losses_T[part],
            grad_CV if has_gradient else None,
            logit_scale,
            softcap,
        )
        if plan.grad_x:
            product_into(grad_x[part], grad_CV, weight)
        if plan.grad_weight:
            add_product(grad_weight, grad_CV.t(), x_CD)
    return ChunkedLoss(
        losses_T, grad_x if plan.grad_x else None, grad_weight if plan.grad_weight else None
    )


def chunk_rows(vocab_size: int, logits_dtype: torch.dtype, device: torch.device) -> int:
    """As many rows as a chunk's bytes allow, in steps that fill a GPU's tiles."""
    chunk_bytes = CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    return max(chunk_bytes // (vocab_size * logits_dtype.itemsize) // 256 * 256, 256)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif out.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # a CPU has no products with another dtype's result
        wider = torch.promote_types(out.dtype, left.dtype)
        out.copy_(torch.mm(left.to(wider), right.to(wider)))


def plain_row_losses(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    grad_CV: Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """What triton.py's kernel does: by cpu.cpp where it can, else by torch's ops, in fp32."""
    if cpu.serves(logits_CV, grad_CV, softcap):
        cpu.row_losses(logits_CV, targets_C, losses_C, grad_CV, logit_scale)
        return
    values = logits_CV.float() * logit_scale
    slope: Tensor | float = logit_scale
    if softcap is not None:
        tanh = torch.tanh(values / softcap)
        values, slope = tanh * softcap, (1 - tanh.square()) * logit_scale
    counts = targets_C != IGNORED
    own = targets_C.where(counts, 0).long().unsqueeze(1)
    sums = values.logsumexp(-1, keepdim=True)
    losses_C.copy_((sums - values.gather(1, own)).squeeze(1).where(counts, 0.0))
    if grad_CV is not None:
        shares = values.sub_(sums).exp_()
        shares.scatter_add_(1, own, torch.full_like(own, -1.0, dtype=shares.dtype))
        grad_CV.copy_((shares * slope).where(counts.unsqueeze(1), 0.0))
