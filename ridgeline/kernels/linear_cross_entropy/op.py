"""What the registry knows of a head's loss: its work, its shapes, what it is timed against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import given, label, normal
from ridgeline.kernels.linear_cross_entropy import reference, summed_loss
from ridgeline.kernels.linear_cross_entropy.chunks import LossPlan, losses_and_gradients
from ridgeline.kernels.linear_cross_entropy.reference import IGNORED
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class LossCase:
    rows: int
    size: int
    vocab_size: int
    dtype: torch.dtype = BF16
    softcap: float | None = None
    logit_scale: float | None = None
    ignored: str = "some"  # "some", "all", "none"
    chunk_rows: int | None = None
    logits_dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        return label(
            (self.rows, self.size, self.vocab_size),
            self.dtype,
            self.softcap and f"cap {self.softcap:g}",
            self.logit_scale and f"scale {self.logit_scale:g}",
            self.ignored != "some" and f"{self.ignored} ignored",
            self.chunk_rows and f"by {self.chunk_rows}",
            self.logits_dtype and f"logits {label(self.logits_dtype)}",
        )


def make(setting: LossCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    rows, size, vocab_size = setting.rows, setting.size, setting.vocab_size
    targets = torch.randint(vocab_size, (rows,), device=device, generator=generator)
    if setting.ignored != "none":
        targets[:: 3 if setting.ignored == "some" else 1] = IGNORED
    inputs: OpInputs = {
        "x_TD": normal((rows, size), setting.dtype, device, generator),
        "weight_VD": normal((vocab_size, size), setting.dtype, device, generator, size**-0.5),
        "targets_T": targets,
    }
    return inputs | given(
        softcap=setting.softcap,
        logit_scale=setting.logit_scale,
        chunk_rows=setting.chunk_rows,
        logits_dtype=setting.logits_dtype,
    )


def case(*args: Any, **settings: Any) -> Case:
    setting = LossCase(*args, **settings)
    return Case(
        setting.label,
        partial(make, setting),
        setting.dtype,
        reduction=setting.size * max(setting.rows, 1),
        roundings=4,  # the logits, their gradient, and the products' results
        gradients=("x_TD", "weight_VD"),
    )


def define(
    chunk_rows: int | None = None, logits_dtype: torch.dtype | None = None, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """The reference, whose result no way of cutting the work may change."""
    return reference.linear_cross_entropy(**inputs)


def define_all(**inputs: Any) -> tuple[Tensor, ...]:
    """With the gradients of the sum; the loss can be differentiated again."""
    leaves = {name: inputs[name].requires_grad_() for name in ("x_TD", "weight_VD")}
    loss, count = define(**inputs)
    grad_x, grad_weight = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    return loss, count, grad_x, grad_weight.float()


def launch(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The loss's sum, the count and both gradients: all that a training step takes from it."""
    from ridgeline.kernels.linear_cross_entropy import triton

    plan = LossPlan(True, True, logits_dtype, chunk_rows)
    result = losses_and_gradients(
        x_TD, weight_VD, targets_T, logit_scale, softcap, triton.row_losses, plan
    )
    assert result.grad_x_TD is not None
    assert result.grad_weight_VD is not None
    count = (targets_T != IGNORED).sum()
    return result.losses_T.sum(), count, result.grad_x_TD, result.grad_weight_VD


def differentiable(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    from ridgeline.kernels.linear_cross_entropy import triton

    plan = LossPlan(logits_dtype=logits_dtype, chunk_rows=chunk_rows)
    return summed_loss(x_TD, weight_VD, targets_T, logit_scale, softcap, triton.row_losses, plan)


def cost(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, **_: Any) -> OpCost:
    """Three products. The logits of a chunk need not leave the chip, so they are not counted."""
    (rows, size), vocab_size = x_TD.shape, weight_VD.shape[0]
    return OpCost(
        x_TD.nbytes + weight_VD.nbytes + targets_T.nbytes,
        x_TD.nbytes + 4 * weight_VD.numel(),
        flops=6.0 * rows * size * vocab_size,
        matrix_dtype=dtype_name(x_TD.dtype),
    )


def backward_of(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def eager(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """torch's ops over all logits at once, without scale and cap."""
    x, weight = x_TD.detach().requires_grad_(), weight_VD.detach().requires_grad_()
    logits = functional.linear(x, weight).float()
    loss = functional.cross_entropy(logits, targets_T, reduction="sum", ignore_index=IGNORED)
    return backward_of(loss, x, weight)


def torch_fused(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """torch's own op, which came with 2.13."""
    x, weight = x_TD.detach().requires_grad_(), weight_VD.detach().requires_grad_()
    fused = functional.linear_cross_entropy
    loss = fused(x, weight, targets_T, reduction="sum", ignore_index=IGNORED)
    return backward_of(loss, x, weight)


def liger(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """Liger's, where it is installed; it sums the weight's gradient in bf16."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x, weight = x_TD.detach().requires_grad_(), weight_VD.detach().requires_grad_()
    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
    return backward_of(fused(weight, x, targets_T), x, weight)


SMALL = [
    case(1, 16, 7, FP32, ignored="none"),
    case(5, 32, 63, FP32),
    case(9, 40, 1000, BF16, chunk_rows=4),
    case(33, 64, 5000, FP32, chunk_rows=16),  # rows in two blocks, chunks of which the last is one
    case(12, 64, 130, FP16, logit_scale=0.125, chunk_rows=5),
    case(12, 64, 1000, FP32, softcap=2.0),
    case(12, 64, 1000, BF16, softcap=5.0, logit_scale=3.0, chunk_rows=7),
    case(8, 64, 300, BF16, logits_dtype=FP32),
    case(6, 32, 100, FP32, ignored="all"),
]
LARGE = [
    case(1000, 2048, 32000, BF16),
    case(4096, 2048, 128256, BF16),
    case(777, 576, 49152, FP16, chunk_rows=256),
    case(777, 2304, 256000, BF16, softcap=30.0, chunk_rows=256),
    case(777, 2304, 50257, FP32, chunk_rows=512),  # rows that are not aligned
    case(20000, 64, 128256, BF16, chunk_rows=20000),  # a chunk past 2^31 logits
]
BENCH = [
    case(32768, 2048, 128256, BF16, ignored="none", chunk_rows=rows) for rows in (2048, 4096, 8192)
] + [
    case(32768, 2048, 128256, BF16, ignored="none", logits_dtype=FP32),
    case(16384, 4096, 128256, BF16, ignored="none"),
    case(16384, 2304, 256000, BF16, ignored="none", softcap=30.0),
]
COMPILE = [
    case(4, 16, 8192, BF16),
    case(4, 16, 8192, BF16, softcap=30.0),
    case(4, 16, 5001, FP32),
]

OP = Op(
    name="linear_cross_entropy",
    summary="A head's loss and its gradients without the logits of all rows",
    **functions(define_all, launch, cost, eager=eager, torch=torch_fused, liger=liger),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    differentiable=differentiable,
)
