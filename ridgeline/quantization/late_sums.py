"""Residuals that the next norm adds: for fp8 with many rows.

torch's fp8 products cannot add a residual, so it takes its own pass, which reads both and writes
their sum for the next norm to read again. Here a projection leaves the sum to that norm
(`ResidualStream`), which also rounds to codes in the same pass. Sums are the same bits; a GPU's
norm may add its squares in another order.

    model = with_late_sums(model)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ridgeline.kernels.quantized_linear import SCALED_MM_ROWS
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import ExpertMLP, Fusion, Linear, ResidualStream, RMSNorm
from ridgeline.quantization.head import HEAD
from ridgeline.quantization.linear import CodedRows, QuantizedLinear
from ridgeline.quantization.scheme import FP8


class LateSums(QuantizedLinear):
    """A projection that takes a `ResidualStream` where others take a tensor."""

    def project(self, x_TD: Tensor | CodedRows | ResidualStream, fusion: Fusion) -> Any:
        """With a `ResidualStream` as residual, a `ResidualStream`."""
        if isinstance(x_TD, ResidualStream):
            x_TD, norm = self._taken(x_TD, fusion.norm)
            fusion = fusion._replace(norm=norm)
        stream = fusion.residual
        if not isinstance(stream, ResidualStream):
            return super().project(x_TD, fusion)
        assert fusion.out is None, "a sum is not left anywhere"
        before_TO = stream.total()
        num_rows = len(x_TD.codes if isinstance(x_TD, CodedRows) else x_TD)
        if num_rows < SCALED_MM_ROWS:  # our own kernels add it for free
            added = super().project(x_TD, fusion._replace(residual=before_TO))
            return ResidualStream(_tensor(added))
        product = super().project(x_TD, fusion._replace(residual=None))
        return ResidualStream(before_TO, _tensor(product))

    def _taken(
        self, stream: ResidualStream, norm: RMSNorm | None
    ) -> tuple[Tensor | CodedRows, RMSNorm | None]:
        """The stream after its norm as codes, if there is an update to add."""
        if norm is None or stream.update_TD is None or self.takes_plain(stream.x_TD):
            return stream.total(), norm
        return CodedRows(*stream.rounded(norm, FP8)), None


def _tensor(y_TO: Tensor | CodedRows) -> Tensor:
    assert isinstance(y_TO, Tensor), "codes have no residual"
    return y_TO


def with_late_sums(model: Transformer) -> Transformer:
    """A copy that shares all weights, where it is faster: on a GPU, with all projections in fp8
    with fp8 inputs and one scale per row. Otherwise the model itself.
    """
    return late_copy(model) if model.embed.weight.is_cuda and can_add_late(model) else model


def late_copy(model: Transformer) -> Transformer:
    copy = with_kinds(model, lambda kind: LateSums if kind is QuantizedLinear else kind)
    copy.adds_late = True
    return copy


def can_add_late(model: Transformer) -> bool:
    """Whether a norm follows every residual, and a product of codes every norm."""
    if model.config.post_norms or model.config.residual_scale != 1.0:
        return False
    named = [(name, module) for name, module in model.named_modules() if name != HEAD]
    if any(isinstance(module, Linear | ExpertMLP) for _, module in named):
        return False
    projections = [module for _, module in named if isinstance(module, QuantizedLinear)]
    return bool(projections) and all(
        type(part) is QuantizedLinear and part.inputs == FP8 and part.scheme.spread != "block"
        for part in projections
    )
