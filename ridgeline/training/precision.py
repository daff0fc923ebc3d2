"""Weights in training: fp32, or bf16 to compute with and fp32 beside them to learn in.

An update is far smaller than a bf16 weight's last digit: without the fp32 weight it would be lost
(weight 1.0, lr 1e-5: 100 steps move nothing). The bf16 weight is the fp32 one rounded, after every
step.

    weights = Weights(model, "bf16")
    weights.masters["embed.weight"]         # fp32, what the optimizer changes
    weights.round()                         # into the model
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.models import Transformer
from ridgeline.training.config import Precision

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Weights:
    """A model's parameters, each with its fp32 master: itself in fp32. The model comes in fp32 and
    leaves in the dtype that it computes in. A tied table stands once.
    """

    def __init__(self, model: Transformer, precision: Precision) -> None:
        model.requires_grad_(True)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        assert {each.dtype for each in self.parameters.values()} == {torch.float32}
        self.has_masters = precision != "fp32"
        self.masters: dict[str, Tensor] = {
            name: parameter.detach() for name, parameter in self.parameters.items()
        }
        if self.has_masters:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.to(COMPUTE_DTYPES[precision])

    @torch.no_grad()
    def round(self) -> None:
        """The masters' values, as the model computes with them."""
        if self.has_masters:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])


class GradientSum:
    """Gradients of several passes, summed in fp32: in bf16 a sum of eight loses what the later ones
    add. fp32 gradients are summed by autograd itself.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._sums: dict[str, Tensor] = {}

    def add(self) -> None:
        """After a backward pass: takes the model's gradients, where they are not in fp32."""
        if not self._weights.has_masters:
            return
        for name, parameter in self._weights.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if name in self._sums:
                self._sums[name] += gradient
            else:
                self._sums[name] = gradient.float()

    def take(self) -> dict[str, Tensor]:
        """Every parameter's gradient in fp32; the model keeps none."""
        if self._weights.has_masters:
            sums, self._sums = self._sums, {}
            return sums
        gradients = {}
        for name, parameter in self._weights.parameters.items():
            if parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad, None
        return gradients
