"""Products with quantized weights by cpu.cpp, for 1 to 32 rows, and the weight itself for more;
host_library.py builds it. Forms of weights and scales are reference.py's, but that int8 lies in
plain rows, and that x comes as it is and is rounded to codes on the way, where `inputs` says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation.cpu import KINDS
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.host_library import address, function, rows_of, short_name
from ridgeline.kernels.quantized_linear.reference import BLOCK

MAX_ROWS = 32  # with more, the weight goes back to x's dtype and torch multiplies
NAMES = {torch.int32: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
INPUTS = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


class _Scales(NamedTuple):
    """Which scale a code has: see cpu.cpp."""

    rows: int  # outputs that share one
    output_stride: int
    group_stride: int
    group: int  # columns that share one


def quantized_linear(
    x_MD: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zero_GO: Tensor | None = None,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation | None = None,
    inputs: torch.dtype | None = None,
) -> Tensor:
    """As the reference. `inputs`: the codes that x, after its norm, is rounded to, with a scale for
    each row, or for each 128 columns of it where the weight's scales are by blocks.
    """
    rows = rows_of(x_MD)
    depth = rows.shape[1]
    scales = _scales(weight, weight_scale, depth)
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    out_MO = torch.empty((*x_MD.shape[:-1], num_outputs), dtype=x_MD.dtype)
    residual = None if residual_MO is None else rows_of(residual_MO)
    name = f"{NAMES[weight.dtype]}_{short_name(x_MD.dtype)}"
    function("quantized_linear", name, "plpppllllpplpffilipllli")(
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        weight_scale.data_ptr(),
        address(zero_GO),
        *scales,
        address(bias_O),
        address(residual),
        0 if residual is None else residual.stride(0),
        address(norm_weight_D),
        eps,
        offset,
        INPUTS[inputs],
        BLOCK if scales.rows == BLOCK else depth,
        KINDS[activation],
        out_MO.data_ptr(),
        rows.shape[0],
        depth,
        num_outputs,
        torch.get_num_threads(),
    )
    return out_MO


def expanded(
    weight: Tensor, weight_scale: Tensor, zero_GO: Tensor | None, depth: int, dtype: torch.dtype
) -> Tensor:
    """The weight [O, D] in `dtype`."""
    num_outputs = weight.shape[0]
    out_OD = torch.empty(num_outputs, depth, dtype=dtype)
    name = f"expand_{NAMES[weight.dtype]}_{short_name(dtype)}"
    function("quantized_linear", name, "pppllllllpi")(
        weight.data_ptr(),
        weight_scale.data_ptr(),
        address(zero_GO),
        *_scales(weight, weight_scale, depth),
        num_outputs,
        depth,
        out_OD.data_ptr(),
        torch.get_num_threads(),
    )
    return out_OD


def _scales(weight: Tensor, scale: Tensor, depth: int) -> _Scales:
    assert weight.is_contiguous() and scale.is_contiguous(), "codes and scales lie side by side"
    if weight.dtype == torch.int32:
        return _Scales(1, 1, scale.stride(0), depth // scale.shape[0])
    if scale.numel() == 1:
        return _Scales(1, 0, 0, depth)
    if scale.dim() == 1:
        return _Scales(1, 1, 0, depth)
    return _Scales(BLOCK, scale.stride(0), 1, BLOCK)
