"""Quantized projections through the CPU kernels: few rows by kernels/quantized_linear/cpu.cpp, with
all that stands around the product in one pass; for many the weight goes back to the model's dtype,
and torch multiplies.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.gated_activation.cpu import gated_activation
from ridgeline.kernels.quantized_linear.cpu import MAX_ROWS, HostProduct
from ridgeline.kernels.quantized_linear.reference import BLOCK, spread
from ridgeline.models.transformer import Fusion, RMSNorm
from ridgeline.products import linear
from ridgeline.quantization.linear import CodedRows, QuantizedLinear


class HostQuantizedLinear(QuantizedLinear):
    made: tuple[HostProduct, RMSNorm | None, Activation | None] | None = None

    def project(self, x_TD: Tensor | CodedRows, fusion: Fusion) -> Tensor:
        assert isinstance(x_TD, Tensor), "codes are made within the kernel"
        norm, activation, residual_TO, out_TO = fusion
        if out_TO is not None:
            return out_TO.copy_(self.project(x_TD, fusion._replace(out=None)))
        product = self._product(norm, activation)
        if x_TD.shape[0] <= MAX_ROWS:
            return product(x_TD, residual_TO)
        return self._many(product, x_TD, norm, activation, residual_TO)

    def _product(self, norm: RMSNorm | None, activation: Activation | None) -> HostProduct:
        """A layer has one norm before it and one activation behind it, so one is kept."""
        if self.made is not None and self.made[1] is norm and self.made[2] == activation:
            return self.made[0]
        product = HostProduct(
            self.in_features,
            self.dtype,
            self.weight,
            self.scale,
            self.zero,
            self.bias,
            None if norm is None else norm.weight,
            1e-6 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            activation,
            self.inputs,
        )
        self.made = (product, norm, activation)
        return product

    def _many(
        self,
        product: HostProduct,
        x_TD: Tensor,
        norm: RMSNorm | None,
        activation: Activation | None,
        residual_TO: Tensor | None,
    ) -> Tensor:
        if self.inputs is not None:
            codes_TD, scale = self.rounded(x_TD, norm)
            x_TD = codes_TD.float() * spread(scale, codes_TD.shape, (1, BLOCK))
        elif norm is not None:
            x_TD = norm(x_TD)
        y_TO = linear(x_TD.to(self.dtype), product.expanded(), self.bias)
        if activation is not None:
            y_TO = gated_activation(y_TO, activation)
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)
