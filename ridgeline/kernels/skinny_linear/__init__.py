"""A product of few rows (1 to 64) with a large weight, as in decoding: norm, bias, activation and
residual folded in, bound by how fast the weight can be read.

`skinny_linear` runs where its tensors are: the reference on a CPU, a kernel on a GPU (in Triton or,
once built and where measured to be faster, in CUDA C++), cuBLAS with the parts around it one by one
for more rows than the kernels are made for, and for shapes where that was measured to be faster.
tune_space.py and cuda_space.py hold the configurations to choose from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.autotune import beaten_by
from ridgeline.kernels.gated_activation.reference import gated_activation
from ridgeline.kernels.op import outputs
from ridgeline.kernels.skinny_linear import reference
from ridgeline.kernels.skinny_linear.cuda_space import OneRow, WorkSplit
from ridgeline.kernels.skinny_linear.dispatch import best, run
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts
from ridgeline.kernels.skinny_linear.tune_space import (
    MAX_ROWS,
    SkinnyConfig,
    product_key,
    search_space,
)

__all__ = ["MAX_ROWS", "SkinnyConfig", "search_space", "skinny_linear", "unfused"]


def skinny_linear(
    x_MD: Tensor, weight_OD: Tensor, fused: FusedParts = NOTHING_FUSED, out_MO: Tensor | None = None
) -> Tensor:
    """See reference.py. No gradients: decoding needs none. The result is left in `out_MO`, where
    that is given: contiguous, of x's dtype.
    """
    if x_MD.device.type == "cpu":
        return _left_in(out_MO, reference.skinny_linear(x_MD, weight_OD, fused))
    if _is_many(x_MD):
        return unfused(x_MD, weight_OD, fused, out_MO)
    if torch.compiler.is_compiling():
        return _left_in(out_MO, traced(x_MD, weight_OD, *fused))
    key = product_key(x_MD, weight_OD, fused.gated, fused.norm_weight_D is not None)
    if beaten_by("skinny_linear", key, x_MD.device) == "cublas":
        return unfused(x_MD, weight_OD, fused, out_MO)
    return launched(x_MD, weight_OD, fused, out_MO)


def _is_many(x_MD: Tensor) -> bool:
    return x_MD.numel() // x_MD.shape[-1] > MAX_ROWS


def launched(
    x_MD: Tensor,
    weight_OD: Tensor,
    fused: FusedParts = NOTHING_FUSED,
    out_MO: Tensor | None = None,
    config: SkinnyConfig | WorkSplit | OneRow | None = None,
) -> Tensor:
    """By our own kernels: as `config` says, else as measured, else in Triton."""
    from ridgeline.kernels.skinny_linear import cuda, triton

    if config is None and x_MD.device.type == "cuda":
        key = product_key(x_MD, weight_OD, fused.gated, fused.norm_weight_D is not None)
        config = best("skinny_linear", key, x_MD.device, source="skinny_linear")
    return run(
        config,
        False,
        lambda split: cuda.skinny_linear(x_MD, weight_OD, fused, out_MO, config=split),
        lambda tiles: triton.skinny_linear(x_MD, weight_OD, fused, out_MO, config=tiles),
    )


def unfused(
    x_MD: Tensor, weight_OD: Tensor, fused: FusedParts = NOTHING_FUSED, out_MO: Tensor | None = None
) -> Tensor:
    """The same with cuBLAS and torch's own passes, each rounding to x's dtype."""
    bias_O, residual_MO, activation = fused.bias_O, fused.residual_MO, fused.activation
    if fused.norm_weight_D is not None:
        gain = fused.norm_weight_D + fused.offset if fused.offset else fused.norm_weight_D
        x_MD = functional.rms_norm(x_MD, x_MD.shape[-1:], gain, fused.eps)
    if bias_O is None and activation is None and residual_MO is None and out_MO is not None:
        return torch.matmul(x_MD, weight_OD.t(), out=out_MO)
    y = functional.linear(x_MD, weight_OD, bias_O)
    if activation == "silu":
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    elif activation is not None:
        (y,) = outputs(gated_activation(y, activation))
    return _left_in(out_MO, y if residual_MO is None else y + residual_MO)


def _left_in(out_MO: Tensor | None, y_MO: Tensor) -> Tensor:
    return y_MO if out_MO is None else out_MO.copy_(y_MO)


@torch.library.custom_op("ridgeline::skinny_linear", mutates_args=())
def traced(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    offset: float,
    activation: str | None,
) -> Tensor:
    return launched(
        x,
        weight,
        FusedParts(bias, residual, norm_weight, eps, offset, activation),  # type: ignore[arg-type]
    )


@traced.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    activation = rest[-1]
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if activation else 1))
