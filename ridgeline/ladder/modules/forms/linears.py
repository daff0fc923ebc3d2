"""Weights of nn.Linear as codes, in any module: our quantized projection in its place.

Only layers of exactly that class: others, and those that a parent reads the weight of itself
(nn.MultiheadAttention), stay. On a CPU the kernels of kernels/quantized_linear/cpu.cpp run where
they can be built; without a compiler the reference does, which is slow, and the rung is dropped.

    replaceable(module, parse_scheme("int8"))        # {"encoder.0.linear1": nn.Linear, …}
    quantize(copy, parse_scheme("int8"))             # in place
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.engine.loading.host_quantized import HostQuantizedLinear
from ridgeline.kernels.host_library import prepare
from ridgeline.models.copies import with_kinds
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.nearest import nearest
from ridgeline.quantization.scheme import GROUPS, Scheme

SMALLEST_WEIGHTS = 4096  # smaller matrices are not worth a kernel of their own


class CodedLinear(nn.Module):
    """What stands where an nn.Linear was: any number of dimensions in, the last one multiplied."""

    def __init__(self, inner: QuantizedLinear) -> None:
        super().__init__()
        self.inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features

    @property
    def is_traceable(self) -> bool:
        """By torch.compile: kernels of the host are called past torch."""
        return not isinstance(self.inner, HostQuantizedLinear)

    def forward(self, x: Tensor) -> Tensor:
        rows_TD = x.reshape(-1, self.in_features)
        y_TO = self.inner(rows_TD.to(self.inner.dtype))
        return y_TO.to(x.dtype).view(*x.shape[:-1], self.out_features)


def replaceable(module: nn.Module, scheme: Scheme) -> dict[str, nn.Linear]:
    return {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.Linear
        and part.weight.numel() >= SMALLEST_WEIGHTS
        and part.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and scheme.fits(*part.weight.shape)
    }


def largest_group(module: nn.Module) -> int | None:
    """Of int4's groups, the largest that a layer's rows are made of; None where none is."""
    linears = [part for part in module.modules() if type(part) is nn.Linear]
    fitting = [g for g in GROUPS if any(part.in_features % g == 0 for part in linears)]
    return max(fitting, default=None)


def quantize(module: nn.Module, scheme: Scheme) -> int:
    """The copy that is given, **in place**; how many layers were replaced. Codes are the nearest:
    a module is given with one example, which is too little to calibrate with.
    """
    result = replaceable(module, scheme)
    on_cpu = all(part.weight.device.type == "cpu" for part in result.values())
    kernels = on_cpu and bool(result) and prepare()
    for name, part in result.items():
        parent_name, _, own_name = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        coded = CodedLinear(_coded(name, part, scheme, kernels))
        setattr(parent, own_name, coded.train(part.training))
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # its fused forward would read linear1.weight
    return len(result)


def _coded(name: str, part: nn.Linear, scheme: Scheme, kernels: bool) -> QuantizedLinear:
    coded = nearest(name, part.weight, part.bias, scheme, part.weight.dtype)
    return with_kinds(coded, lambda kind: HostQuantizedLinear) if kernels else coded
