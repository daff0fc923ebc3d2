"""Quantized projections through the CPU kernels: few rows by kernels/quantized_linear/cpu.cpp, with
all that stands around the product in one pass; for many the weight goes back to the model's dtype,
and torch multiplies.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.gated_activation.cpu import gated_activation
from ridgeline.kernels.quantized_linear.cpu import MAX_ROWS, expanded, quantized_linear
from ridgeline.kernels.quantized_linear.reference import BLOCK, spread
from ridgeline.models.transformer import RMSNorm
from ridgeline.quantization.linear import QuantizedLinear, Rows


class HostQuantizedLinear(QuantizedLinear):
    def forward(
        self,
        x_TD: Tensor | Rows,
        norm: RMSNorm | None = None,
        activation: Activation | None = None,
        residual_TO: Tensor | None = None,
        out_TO: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x_TD, Tensor), "codes are made within the kernel"
        if out_TO is not None:
            return out_TO.copy_(self.forward(x_TD, norm, activation, residual_TO))
        if x_TD.shape[0] > MAX_ROWS:
            return self._many(x_TD, norm, activation, residual_TO)
        folded = (None, 1e-6, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
        about = (self.weight, self.scale, self.zero, self.bias, residual_TO)
        return quantized_linear(x_TD, *about, *folded, activation, self.inputs)

    def _many(
        self,
        x_TD: Tensor,
        norm: RMSNorm | None,
        activation: Activation | None,
        residual_TO: Tensor | None,
    ) -> Tensor:
        dtype = x_TD.dtype
        if self.inputs is not None:
            codes_TD, scale = self.rounded(x_TD, norm)
            x_TD = (codes_TD.float() * spread(scale, codes_TD.shape, (1, BLOCK))).to(dtype)
        elif norm is not None:
            x_TD = norm(x_TD)
        weight_OD = expanded(self.weight, self.scale, self.zero, self.in_features, dtype)
        y_TO = functional.linear(x_TD, weight_OD, self.bias)
        if activation is not None:
            y_TO = gated_activation(y_TO, activation)
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)
