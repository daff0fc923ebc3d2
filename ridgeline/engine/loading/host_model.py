"""A model whose norms and projections run through the CPU kernels: applied from outside, and to a
copy that shares its weights, so that the model it is made of stays what it was.

Projections of few rows go through kernels/skinny_linear where that is faster than torch, with the
norm before them and the activation and the residual behind them in one pass; others through torch,
with the kernels around it. All else is the model's own.

    model = on_host(model)              # once host_library.prepare() said yes
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from ridgeline.engine.loading.host_quantized import HostQuantizedLinear
from ridgeline.kernels.gated_activation.cpu import gated_activation
from ridgeline.kernels.rms_norm.cpu import rms_norm
from ridgeline.kernels.skinny_linear.cpu import most_rows, skinny_linear
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import Fusion, Linear, RMSNorm, Transformer, fused_parts
from ridgeline.parallel.inference.stages import AroundRing
from ridgeline.parallel.inference.tensor import (
    QuantizedRowLinear,
    QuantizedVocabHead,
    RowLinear,
    RowSum,
    VocabHead,
    VocabParts,
)
from ridgeline.products import linear
from ridgeline.quantization.block_linear import BlockLinear, HostBlockLinear
from ridgeline.quantization.linear import QuantizedLinear


class HostNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)  # type: ignore[return-value]


class HostLinear(Linear):
    most_rows: int  # up to so many, our own product is the faster one

    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:
        norm, activation, residual_TO, out_TO = fusion
        if out_TO is not None:
            return out_TO.copy_(self.project(x_TD, fusion._replace(out=None)))
        if x_TD.shape[0] <= self.most_rows:
            return skinny_linear(x_TD, self.weight, fused_parts(self.bias, fusion))
        if norm is not None:
            x_TD = norm(x_TD)
        y_TO = linear(x_TD, self.weight, self.bias)
        if activation is not None:
            y_TO = gated_activation(y_TO, activation)
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)


class HostAroundRing(AroundRing, HostNorm):
    pass


class HostRowLinear(RowSum, HostLinear):
    pass


class HostVocabHead(VocabParts, HostLinear):
    pass


class HostQuantizedRowLinear(RowSum, HostQuantizedLinear):
    pass


class HostQuantizedVocabHead(VocabParts, HostQuantizedLinear):
    pass


INSTEAD: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: HostNorm,
    AroundRing: HostAroundRing,
    Linear: HostLinear,
    RowLinear: HostRowLinear,
    VocabHead: HostVocabHead,
    QuantizedLinear: HostQuantizedLinear,
    BlockLinear: HostBlockLinear,
    QuantizedRowLinear: HostQuantizedRowLinear,
    QuantizedVocabHead: HostQuantizedVocabHead,
}


def on_host(model: Transformer) -> Transformer:
    copy = with_kinds(model, lambda kind: INSTEAD.get(kind, kind))
    for module in list(copy.modules()):
        _quicken(module)
    return copy


def _quicken(module: nn.Module) -> None:
    """Parameters and parts are found in the first place that Python looks at, without a call of
    nn.Module's __getattr__, and calls go straight to `forward`.
    """
    if isinstance(module, HostLinear):
        module.most_rows = most_rows(module.weight)
    module.__dict__.update(module._parameters)
    module.__dict__.update(module._modules)
    kind: Any = type(module)
    module.__class__ = _direct(kind)


@cache
def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, but called without a look for hooks: 4 µs less each time, of 300 a step."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})
