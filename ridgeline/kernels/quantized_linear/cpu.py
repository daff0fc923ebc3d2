"""Products with quantized weights by cpu.cpp, for 1 to 32 rows, and the weight itself for more;
host_library.py builds it. Forms of weights and scales are reference.py's, but that int8 lies in
plain rows, and that x comes as it is and is rounded to codes on the way, where `inputs` says so.

What stays the same from call to call is put together once (`HostProduct`): a call is a few numbers.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation.cpu import KINDS
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.host_library import address, function, rows_of, short_name
from ridgeline.kernels.quantized_linear.reference import BLOCK

MAX_ROWS = 32  # with more, the weight goes back to x's dtype and torch multiplies
NAMES = {torch.int32: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
INPUTS = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


class _Fixed(ctypes.Structure):
    """As cpu.cpp has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "zeros", "bias", "norm")),
        *((name, c_int64) for name in ("scale_rows", "output_stride", "group_stride", "group")),
        *((name, c_int64) for name in ("input_group", "depth", "outputs")),
        *((name, c_float) for name in ("eps", "offset")),
        *((name, c_int) for name in ("inputs", "activation")),
    )


class HostProduct:
    """`act(norm(x) @ dequantized(weight)ᵀ + bias) + residual` for x in `dtype`; as the reference.

    `inputs`: the codes that x, after its norm, is rounded to, with a scale for each row, or for
    each 128 columns of it where the weight's scales are by blocks.
    """

    def __init__(
        self,
        depth: int,
        dtype: torch.dtype,
        weight: Tensor,
        weight_scale: Tensor,
        zero_GO: Tensor | None = None,
        bias_O: Tensor | None = None,
        norm_weight_D: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        activation: Activation | None = None,
        inputs: torch.dtype | None = None,
    ) -> None:
        self._held = (weight, weight_scale, zero_GO, bias_O, norm_weight_D)
        scales = _scales(weight, weight_scale, depth)
        fixed = _Fixed(
            *(address(tensor) for tensor in self._held),
            *scales,
            BLOCK if scales[0] == BLOCK else depth,
            depth,
            weight.shape[0],
            eps,
            offset,
            INPUTS[inputs],
            KINDS[activation],
        )
        self.depth, self.dtype = depth, dtype
        self.num_outputs = weight.shape[0] // (1 if activation is None else 2)
        self._fixed, self._address = fixed, ctypes.addressof(fixed)
        self._name = f"{NAMES[weight.dtype]}_{short_name(dtype)}"
        self._run = function("quantized_linear", self._name, "pplplpli")

    def __call__(self, x_MD: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        rows = rows_of(x_MD)
        assert rows.dtype == self.dtype, f"x in {rows.dtype}, made for {self.dtype}"
        out_MO = torch.empty((*x_MD.shape[:-1], self.num_outputs), dtype=self.dtype)
        residual = None if residual_MO is None else rows_of(residual_MO)
        self._run(
            self._address,
            rows.data_ptr(),
            rows.stride(0),
            address(residual),
            0 if residual is None else residual.stride(0),
            out_MO.data_ptr(),
            rows.shape[0],
            torch.get_num_threads(),
        )
        return out_MO

    def expanded(self) -> Tensor:
        """The weight [O, D] in x's dtype."""
        out_OD = torch.empty(self._held[0].shape[0], self.depth, dtype=self.dtype)
        expand = function("quantized_linear", f"expand_{self._name}", "ppi")
        expand(self._address, out_OD.data_ptr(), torch.get_num_threads())
        return out_OD


def _scales(weight: Tensor, scale: Tensor, depth: int) -> tuple[int, int, int, int]:
    """Outputs that share a scale, the strides from output to output and from group to group, and a
    group's columns.
    """
    assert weight.is_contiguous(), "codes lie side by side"
    assert scale.is_contiguous(), "scales lie side by side"
    if weight.dtype == torch.int32:
        return 1, 1, scale.stride(0), depth // scale.shape[0]
    if scale.numel() == 1:
        return 1, 0, 0, depth
    if scale.dim() == 1:
        return 1, 1, 0, depth
    return BLOCK, scale.stride(0), 1, BLOCK
