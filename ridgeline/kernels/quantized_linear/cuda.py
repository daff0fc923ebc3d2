"""Calls the kernels of cuda.cu, through the launcher that skinny_linear has too: which kind of
weights these are, and the same arguments as triton.py's launcher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.quantized_linear.reference import Operands, default_out, packed_bits
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.skinny_linear.cuda import few_rows
from ridgeline.kernels.skinny_linear.cuda_space import (
    OneRow,
    WeightKind,
    WorkSplit,
    fits_few,
    fits_one_row,
)
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts


def quantized_linear(
    given: Operands,
    fused: FusedParts = NOTHING_FUSED,
    out_dtype: torch.dtype | None = None,
    config: WorkSplit | OneRow | None = None,
    pdl: bool = True,
    defines: tuple[str, ...] = (),
) -> Tensor:
    """The launcher; raises UnsupportedError for what the kernels do not do. The norm of more rows
    than the kernel for few takes is a kernel of its own.
    """
    x_MD, weight, weight_scale, zero_GO, x_scale = given
    kind = kind_of(x_MD, weight)
    rows, depth = x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    folds = fits_few(kind, rows, depth) or fits_one_row(kind, rows, depth)
    if fused.norm_weight_D is not None and not folds:
        x_MD = rms_norm(x_MD, fused.norm_weight_D, fused.eps, fused.offset)
        fused = fused._replace(norm_weight_D=None)
    return few_rows(
        kind, x_MD, weight, fused, out_dtype or default_out(x_MD),
        scale=weight_scale, zero=zero_GO, x_scale=x_scale,
        config=config, pdl=pdl, defines=defines,
    )  # fmt: skip


def kind_of(x_MD: Tensor, weight: Tensor) -> WeightKind:
    if weight.dtype == torch.int32:
        return "int4" if packed_bits(weight, x_MD.shape[-1]) == 4 else "int8 words"
    if weight.dtype == torch.int8:
        return "int8 codes" if x_MD.dtype == torch.int8 else "int8 rows"
    if weight.dtype == torch.float8_e4m3fn:
        return "fp8" if x_MD.dtype == weight.dtype else "fp8 weights"
    raise UnsupportedError(f"weights of {weight.dtype} with x in {x_MD.dtype} are not supported")
