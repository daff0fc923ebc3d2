"""A chunk's losses, and in place of its logits their gradient, in Triton: one program a row, which
is read once for its softmax's sum and once more for the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch
from ridgeline.kernels.linear_cross_entropy.reference import IGNORED

BLOCK = 4096  # logits a program holds at once. A heuristic until measured
LOG2_E = 1.4426950408889634


@triton.jit
def capped(logit, logit_scale, softcap, HAS_CAP: tl.constexpr):
    """A logit scaled and capped, and the slope of that."""
    value, slope = logit * logit_scale, logit_scale
    if HAS_CAP:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(value / softcap * 2.8853900817779268))
        value, slope = softcap * tanh, (1.0 - tanh * tanh) * logit_scale
    return value, slope


@triton.jit
def row_loss_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    grad_ptr,
    logits_stride,
    grad_stride,
    vocab_size,
    logit_scale,
    softcap,
    LOG2_E: tl.constexpr,
    IGNORED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, BLOCK)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if HAS_GRADIENT:
            nothing = tl.zeros((BLOCK,), dtype=grad_ptr.dtype.element_ty)
            for start in range(0, vocab_size, BLOCK):
                tl.store(grad_ptr + start + columns, nothing, mask=start + columns < vocab_size)
    else:
        # A target that is no token makes the loss NaN: nothing is read outside the row. Read before
        # the sums, whose barriers keep other warps from writing a gradient in its place first.
        is_token = (target >= 0) & (target < vocab_size)
        own = tl.load(logits_ptr + target, mask=is_token, other=float("nan")).to(tl.float32)
        # A name of its own: in the loops a slope is a tensor, and no name may change its shape.
        own, _own_slope = capped(own, logit_scale, softcap, HAS_CAP)
        largest = -float("inf")
        total = 0.0
        for start in range(0, vocab_size, BLOCK):
            keep = start + columns < vocab_size
            logit = tl.load(logits_ptr + start + columns, mask=keep, other=0.0).to(tl.float32)
            value, slope = capped(logit, logit_scale, softcap, HAS_CAP)
            value = tl.where(keep, value, -float("inf"))
            larger = tl.maximum(largest, tl.max(value, axis=0))
            shares = tl.exp2((value - larger) * LOG2_E)
            total = total * tl.exp2((largest - larger) * LOG2_E) + tl.sum(shares, axis=0)
            largest = larger
        tl.store(losses_ptr + row, tl.log(total) + largest - own)
        if HAS_GRADIENT:
            inverse = 1.0 / total
            for start in range(0, vocab_size, BLOCK):
                keep = start + columns < vocab_size
                logit = tl.load(logits_ptr + start + columns, mask=keep, other=0.0).to(tl.float32)
                value, slope = capped(logit, logit_scale, softcap, HAS_CAP)
                share = tl.exp2((value - largest) * LOG2_E) * inverse
                grad = (share - tl.where(start + columns == target, 1.0, 0.0)) * slope
                grad = grad.to(grad_ptr.dtype.element_ty)
                tl.store(grad_ptr + start + columns, grad, mask=keep)


def row_losses(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    grad_CV: Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """Fills `losses_C` and, where it is given, `grad_CV`, which may be `logits_CV` itself."""
    num_rows, vocab_size = logits_CV.shape
    grad = logits_CV if grad_CV is None else grad_CV
    assert logits_CV.stride(1) == grad.stride(1) == 1, "rows are contiguous"
    if num_rows:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        launch(
            row_loss_kernel,
            (num_rows,),
            (
                logits_CV,
                targets_C,
                losses_C,
                grad,
                logits_CV.stride(0),
                grad.stride(0),
                vocab_size,
                float(logit_scale),
                1.0 if softcap is None else float(softcap),
            ),
            LOG2_E=LOG2_E,
            IGNORED=IGNORED,
            HAS_CAP=softcap is not None,
            HAS_GRADIENT=grad_CV is not None,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )
